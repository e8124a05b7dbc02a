// The timeline of this process: the times of each operation. The threads that work on operations only record times; a
// thread of the timeline writes the records to the file.
//
// One object per process, since several runtimes (process sets) share one file.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/file_descriptor.h"
#include "base/forks.h"
#include "timeline/record_file.h"
#include "timeline/records.h"

namespace mykv {

class Timeline {
 public:
  // Whether new operations are recorded. This check is the only cost while the timeline is off.
  static bool on() { return on_.load(std::memory_order_relaxed); }
  static bool marks_cycles() { return marks_cycles_.load(std::memory_order_relaxed); }
  // The process's one timeline. Recreated in a fork, since the parent's mutexes may be locked forever.
  static Timeline& instance();

  // Records to an empty regular file, whose first line becomes `about`. Throws Error if the timeline is started
  // already, here or in the parent of this fork. Returns an errno if the file cannot be written, otherwise 0.
  int start(FileDescriptor file, const std::string& about, bool mark_cycles);
  // Writes the remaining records and ends the timeline. Returns the errno that ended it earlier, or 0; ETIMEDOUT if the
  // file system does not answer. Does nothing if the timeline is not started.
  int stop();

  // A record of this session that begins now, or null if the timeline is off.
  std::unique_ptr<RequestRecord> record();
  uint64_t session() const { return session_.load(std::memory_order_relaxed); }
  // Adds a record; a record of an earlier session is dropped.
  void add(std::unique_ptr<RequestRecord> request);
  void add(AwakeRecord awake);

  // While an Interest lives, `flag`, in the host's shared memory, counts the timelines that need its ranks' stamps.
  class Interest {
   public:
    explicit Interest(std::atomic<uint32_t>& flag);
    Interest(const Interest&) = delete;
    Interest& operator=(const Interest&) = delete;
    ~Interest();

   private:
    std::atomic<uint32_t>& flag_;
    const uint32_t forks_ = fork_number();
  };

 private:
  struct Batch {
    std::vector<std::unique_ptr<RequestRecord>> requests;
    std::vector<AwakeRecord> awake;
    uint64_t dropped = 0;
    size_t weight = 0;  // parts, plus one for each record
    void clear();
  };
  explicit Timeline(bool is_of_parent) : is_of_parent_(is_of_parent) {}
  void end_recording();
  void run(RecordFile file, uint64_t of);

  inline static std::atomic<bool> on_{false};
  inline static std::atomic<bool> marks_cycles_{false};
  std::atomic<uint64_t> session_{0};

  std::mutex control_;  // serializes start() and stop()
  std::mutex mutex_;    // guards the members of this paragraph
  std::condition_variable news_;
  Batch batch_;
  std::vector<std::unique_ptr<RequestRecord>> spare_;  // records for reuse, with their memory
  bool stopping_ = false;
  std::condition_variable over_;
  bool ended_ = false;   // the writer writes no more
  bool active_ = false;  // records are accepted
  bool started_ = false;
  int failure_ = 0;
  std::vector<std::atomic<uint32_t>*> interests_;

  std::atomic<uint64_t> writes_{0};
  std::thread writer_;
  const bool is_of_parent_;  // the timeline was started in the parent of this fork, which owns the file
};

}  // namespace mykv
