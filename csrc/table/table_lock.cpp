#include "table/table_lock.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <optional>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/text.h"

// pthread_mutex_clocklock exists since glibc 2.30. ThreadSanitizer does not know it.
#if defined(__GLIBC__) && !defined(__SANITIZE_THREAD__)
#if __GLIBC_PREREQ(2, 30)
#define MYKV_CLOCKLOCK
#endif
#endif

namespace mykv {

namespace {
#ifndef MYKV_CLOCKLOCK
constexpr useconds_t kPollUs = 200;  // between two attempts to lock a mutex
#endif

SharedMutex::Result result_of(int failed) {
  switch (failed) {
    case 0:
      return SharedMutex::Result::taken;
    case EBUSY:
    case ETIMEDOUT:
      return SharedMutex::Result::busy;
    case EOWNERDEAD:
      return SharedMutex::Result::inherited;
    default:
      return SharedMutex::Result::unusable;
  }
}
}  // namespace

void SharedMutex::init() {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  const int failed = pthread_mutex_init(&mutex_, &attributes);
  pthread_mutexattr_destroy(&attributes);
  if (failed != 0) throw Error("mykv cannot make a lock in shared memory");
}

SharedMutex::Result SharedMutex::try_lock() { return result_of(pthread_mutex_trylock(&mutex_)); }

SharedMutex::Result SharedMutex::try_lock(int64_t timeout_us) {
  // Not pthread_mutex_timedlock: it uses a clock that may be set back, which would lengthen the wait.
  const int64_t until_ns = now_ns() + timeout_us * 1000;
#ifdef MYKV_CLOCKLOCK
  const timespec until{until_ns / 1000000000, until_ns % 1000000000};
  return result_of(pthread_mutex_clocklock(&mutex_, CLOCK_MONOTONIC, &until));
#else
  for (;;) {
    const Result result = try_lock();
    if (result != Result::busy || now_ns() >= until_ns) return result;
    usleep(kPollUs);
  }
#endif
}

namespace {

// Time between two checks of the lock's holder. A waiting thread counts these waits instead of reading a clock, since
// its process may have been stopped too.
constexpr int64_t kSliceUs = 50000;
constexpr int64_t kWritingNs = 100000000;  // writing a verdict takes far less, unless its writer was stopped

// Ends the process if this thread holds the mutex; only glibc tells the owner of a mutex.
void require_without(std::mutex& mutex) {
#ifdef __GLIBC__
  if (mutex.native_handle()->__data.__owner != syscall(SYS_gettid)) return;
  std::fputs("mykv: a thread takes the table's lock while it holds a mutex that is elsewhere taken inside the lock\n",
             stderr);
  std::abort();
#else
  (void)mutex;
#endif
}

}  // namespace

TableLock::TableLock(Shared& shared, Verdict& verdict, int local_rank, Callbacks around)
    : shared_(shared), verdict_(verdict), local_rank_(local_rank), around_(std::move(around)) {}

bool TableLock::take(int64_t limit_us) {
  if (inner_ != nullptr) require_without(*inner_);
  require_good();
  const SharedMutex::Result result = shared_.mutex.try_lock();
  if (result == SharedMutex::Result::inherited || result == SharedMutex::Result::unusable) died(result);
  if (result == SharedMutex::Result::busy && !wait(limit_us)) return false;
  // No atomic increment: only the lock's holder writes `holding`.
  const uint64_t last = shared_.holding.load(std::memory_order_relaxed);
  shared_.holding.store((last / kHolderRanks + 1) * kHolderRanks + static_cast<uint64_t>(local_rank_) + 1,
                        std::memory_order_relaxed);
  if (verdict_.state.load(std::memory_order_acquire) != 0) {
    give_back();
    require_good();
  }
  return true;
}

bool TableLock::comes_free(int64_t limit_us) {
  if (holder() < 0) return true;
  if (!take(limit_us)) return false;
  give_back();
  return true;
}

void TableLock::give_back() {
  const uint64_t mine = shared_.holding.load(std::memory_order_relaxed);
  shared_.holding.store(mine / kHolderRanks * kHolderRanks, std::memory_order_relaxed);
  shared_.mutex.unlock();
}

bool TableLock::wait(int64_t limit_us) {
  const int64_t since = now_ns();
  // This wait in waits_; added in the second slice, since most waits are short.
  std::optional<std::multiset<int64_t>::iterator> entered;
  const auto leave = [&](void*) {
    if (!entered) return;
    std::lock_guard<std::mutex> lock(mutex_);
    waits_.erase(*entered);
  };
  const std::unique_ptr<void, decltype(leave)> leaving(this, leave);
  uint64_t seen = shared_.holding.load(std::memory_order_relaxed);
  for (int64_t kept_us = 0;;) {
    const int64_t slice = limit_us > 0 ? std::min(kSliceUs, limit_us) : kSliceUs;
    const SharedMutex::Result result = shared_.mutex.try_lock(slice);
    if (result == SharedMutex::Result::taken) return true;
    if (result != SharedMutex::Result::busy) died(result);
    require_good();
    around_.beat();
    const uint64_t now = shared_.holding.load(std::memory_order_relaxed);
    kept_us = std::exchange(seen, now) == now ? kept_us + slice : 0;
    std::string why;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!entered) entered = waits_.insert(since);
      if (patience_us_ > 0 && kept_us >= patience_us_) why = impatient_;
    }
    if (!why.empty()) {
      give_verdict(locked().what() + (" (" + why + ")"));
      require_good();
    }
    if (limit_us > 0 && kept_us >= limit_us) return false;
  }
}

void TableLock::notice_death() {
  const SharedMutex::Result result = shared_.mutex.try_lock();
  if (result == SharedMutex::Result::taken) {
    shared_.mutex.unlock();
  } else if (result != SharedMutex::Result::busy) {
    died(result);
  }
}

// Gives the verdict, since the table may be inconsistent after a rank has died during a change. The lock stays
// unusable.
void TableLock::died(SharedMutex::Result result) {
  const int rank = holder();
  const std::string who =
      rank < 0 ? "a rank of this host" : "rank " + std::to_string(around_.ranks[static_cast<size_t>(rank)]);
  give_verdict(who + " died while it changed mykv's shared table");
  if (result == SharedMutex::Result::inherited) shared_.mutex.unlock();
  throw TableVerdict(verdict_text());
}

int TableLock::holder() const {
  return static_cast<int>(shared_.holding.load(std::memory_order_relaxed) % kHolderRanks) - 1;
}

TableLocked TableLock::locked() const {
  std::vector<int> ranks;
  const int rank = holder();
  // A holder that was stopped before it recorded itself, or after it removed the record, must be an unresponsive rank.
  if (rank >= 0)
    ranks = {rank};
  else
    ranks = around_.unresponsive();
  std::string who;
  for (int r : ranks)
    who += (who.empty() ? "rank " : " or rank ") + std::to_string(around_.ranks[static_cast<size_t>(r)]);
  if (who.empty()) who = "a rank of this host";
  return TableLocked("mykv's shared table is kept locked by " + who + ", which does not respond (is it stopped?)",
                     rank);
}

void TableLock::give_verdict(const std::string& reason) {
  uint32_t good = 0;
  if (!verdict_.state.compare_exchange_strong(good, kWriting, std::memory_order_acq_rel)) return;
  set_text(verdict_.text, Verdict::kTextBytes, reason);
  verdict_.state.store(kGiven, std::memory_order_release);
  around_.ring_all();
}

std::string TableLock::verdict_text() const {
  const int64_t since = now_ns();
  while (verdict_.state.load(std::memory_order_acquire) != kGiven) {
    if (now_ns() - since > kWritingNs) return "mykv's shared table was given up by a rank of this host";
    sched_yield();
  }
  return verdict_.text;
}

void TableLock::set_patience(int64_t limit_us, const std::string& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (patience_us_ > 0 && patience_us_ <= limit_us) return;
  patience_us_ = limit_us;
  impatient_ = why;
}

int64_t TableLock::longest_wait() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return waits_.empty() ? 0 : now_ns() - *waits_.begin();
}

}  // namespace mykv
