#include "timeline/timeline.h"

#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>

#include "base/clock.h"
#include "base/error.h"

namespace mykv {

namespace {

// Time between two writes; the records of this time are lost if the process is killed.
constexpr auto kPeriod = std::chrono::milliseconds(100);
constexpr size_t kMany = 20000;  // this number of parts is written without waiting for the period; some 4 MB
// Parts in memory (some 100 MB) if the disk is too slow; further operations are left out.
constexpr size_t kMost = 400000;
constexpr size_t kWriteBytes = 4 << 20;  // bytes that are written at once
constexpr size_t kSpare = 4096;          // records that are kept for reuse
// If one write takes longer, the file system is considered unresponsive.
constexpr auto kLongestWrite = std::chrono::seconds(10);
constexpr int kNice = 10;  // lower priority than training

// Blocks signals in a new thread: Ctrl-C must reach Python's main thread.
class WithoutSignals {
 public:
  WithoutSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  WithoutSignals(const WithoutSignals&) = delete;
  WithoutSignals& operator=(const WithoutSignals&) = delete;
  ~WithoutSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

void Timeline::Batch::clear() {
  requests.clear();
  awake.clear();
  dropped = 0;
  weight = 0;
}

// Never destroyed: threads may use it until the process ends.
Timeline& Timeline::instance() {
  static Timeline& timeline = *new Timeline(false);
  static const int registered = pthread_atfork(nullptr, nullptr, [] {
    on_.store(false, std::memory_order_relaxed);
    marks_cycles_.store(false, std::memory_order_relaxed);
    const bool was_started = timeline.is_of_parent_ || timeline.session() != 0;
    new (&timeline) Timeline(was_started);  // the old object is not destroyed, since it holds the parent's thread
  });
  (void)registered;
  return timeline;
}

int Timeline::start(FileDescriptor file, const std::string& about, bool mark_cycles) {
  if (is_of_parent_) throw Error("the timeline belongs to the process that this one is a fork of");
  std::lock_guard<std::mutex> control(control_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (started_) throw Error("a timeline is being recorded already: call stop_timeline() first");
  }
  RecordFile records(std::move(file));
  records.add_line(about);
  const int failure = records.write();
  if (failure != 0) return failure;
  std::lock_guard<std::mutex> lock(mutex_);
  batch_ = {};
  stopping_ = ended_ = false;
  failure_ = 0;
  session_.fetch_add(1, std::memory_order_relaxed);
  {
    const WithoutSignals block;
    writer_ = std::thread([this, of = session()](RecordFile file) { run(std::move(file), of); }, std::move(records));
  }
  started_ = true;
  active_ = true;
  for (std::atomic<uint32_t>* flag : interests_) flag->fetch_add(1, std::memory_order_relaxed);
  marks_cycles_.store(mark_cycles, std::memory_order_relaxed);
  on_.store(true, std::memory_order_relaxed);
  return 0;
}

// Call it while mutex_ is locked.
void Timeline::end_recording() {
  if (!active_) return;
  active_ = false;
  on_.store(false, std::memory_order_relaxed);
  marks_cycles_.store(false, std::memory_order_relaxed);
  for (std::atomic<uint32_t>* flag : interests_) flag->fetch_sub(1, std::memory_order_relaxed);
}

int Timeline::stop() {
  std::lock_guard<std::mutex> control(control_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!started_) return 0;
    end_recording();
    stopping_ = true;
  }
  news_.notify_one();
  std::unique_lock<std::mutex> lock(mutex_);
  bool written = false;
  for (uint64_t before = writes_ - 1; !written && before != writes_;) {
    before = writes_;
    written = over_.wait_for(lock, kLongestWrite, [this] { return ended_; });
  }
  if (written) {
    lock.unlock();
    writer_.join();
    lock.lock();
  } else {
    writer_.detach();  // the file system does not answer; the writer ends when it answers
    session_.fetch_add(1, std::memory_order_relaxed);
  }
  started_ = false;
  batch_ = {};
  spare_.clear();
  return written ? failure_ : ETIMEDOUT;
}

std::unique_ptr<RequestRecord> Timeline::record() {
  if (!on()) return nullptr;
  std::unique_ptr<RequestRecord> request;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!spare_.empty()) {
      request = std::move(spare_.back());
      spare_.pop_back();
    }
  }
  if (!request) request = std::make_unique<RequestRecord>();
  request->session = session();
  request->begin = now_ns();
  return request;
}

void Timeline::add(std::unique_ptr<RequestRecord> request) {
  const size_t weight = request->parts.size() + 1;
  bool many;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!active_ || request->session != session()) return;
    if (batch_.weight > kMost) {
      ++batch_.dropped;
      return;
    }
    many = batch_.weight < kMany && batch_.weight + weight >= kMany;
    batch_.weight += weight;
    batch_.requests.push_back(std::move(request));
  }
  if (many) news_.notify_one();
}

void Timeline::add(AwakeRecord awake) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!active_ || awake.session != session() || batch_.weight > kMost) return;
  ++batch_.weight;
  batch_.awake.push_back(std::move(awake));
}

// The writer thread. stop() and a large batch wake it; otherwise it wakes up after each period. Once a new session has
// begun, the writer of the old session must not touch the timeline.
void Timeline::run(RecordFile file, uint64_t of) {
  prctl(PR_SET_NAME, "mykv timeline");
  const sched_param unused{};
  sched_setscheduler(0, SCHED_BATCH, &unused);  // does not preempt other threads when it wakes up
  setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), kNice);
  Batch batch;
  for (bool last = false; !last;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      news_.wait_for(lock, kPeriod, [this] { return stopping_ || batch_.weight >= kMany; });
      if (session() != of) return;
      std::swap(batch, batch_);
      last = stopping_;
    }
    int failure = 0;
    const auto write = [&] {
      if (failure == 0) failure = file.write();
      ++writes_;
    };
    for (const auto& request : batch.requests) {
      file.add(*request);
      if (file.bytes_to_write() > kWriteBytes) write();
      request->clear();
    }
    for (const AwakeRecord& awake : batch.awake) file.add(awake);
    if (batch.dropped > 0) file.add_dropped(batch.dropped);
    write();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (session() != of) return;
      ended_ = last || failure != 0;
      if (ended_) over_.notify_all();
      if (failure != 0) {
        failure_ = failure;
        end_recording();
        batch_ = {};
        return;
      }
      for (auto& request : batch.requests) {
        if (spare_.size() < kSpare) spare_.push_back(std::move(request));
      }
    }
    batch.clear();
  }
}

Timeline::Interest::Interest(std::atomic<uint32_t>& flag) : flag_(flag) {
  Timeline& timeline = instance();
  std::lock_guard<std::mutex> lock(timeline.mutex_);
  timeline.interests_.push_back(&flag_);
  if (timeline.active_) flag_.fetch_add(1, std::memory_order_relaxed);
}

Timeline::Interest::~Interest() {
  if (forks_ != fork_number()) return;  // the flag is in the list of the parent's timeline
  Timeline& timeline = instance();
  std::lock_guard<std::mutex> lock(timeline.mutex_);
  auto& all = timeline.interests_;
  all.erase(std::find(all.begin(), all.end(), &flag_));
  if (timeline.active_) flag_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace mykv
