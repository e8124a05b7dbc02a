// The timeline of this process: what became of each operation, and when, for Perfetto. The threads that work on
// operations only note times; a thread of the timeline's own makes text of them and writes it.
//
// One object for the process, since several runtimes (process sets) share one file.
#pragma once

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/file_descriptor.h"
#include "operations/operation.h"
#include "timeline/stamps.h"
#include "timeline/trace_file.h"

namespace mykv {

// When a rank came, or a host, which goes by its first rank.
struct ArrivalRecord {
  int rank;
  int64_t time;
};

// Times in nanoseconds of now_ns(); 0 for what did not happen.
struct PartRecord {
  struct Interval {
    int64_t begin = 0;
    int64_t end = 0;
  };
  uint32_t number = 0;
  Interval copy_in;
  Interval wait;
  Interval reduce;      // by whichever rank of the host
  Interval scatter;     // this rank's slice, between hosts
  Interval reduce_all;  // what came from them
  Interval gather;
  Interval spread;  // the result into the slots of this host
  Interval copy_out;
  // Among FlightRecord::arrivals: those of this host's ranks, then, on rank 0 of several hosts, when it heard of which
  // host that all its ranks are there.
  size_t arrivals = 0;
  uint32_t ranks = 0;
  uint32_t hosts = 0;
};

struct FlightRecord {
  std::string name;
  std::string signature;
  std::string error;
  size_t bytes = 0;
  uint64_t turn = 0;
  int priority = 0;
  size_t parts_planned = 1;
  int64_t begin = 0;
  int64_t end = 0;
  uint64_t session = 0;
  std::vector<PartRecord> parts;
  std::vector<ArrivalRecord> arrivals;

  void clear();
};

struct AwakeRecord {
  uint64_t session;
  std::string thread;
  int64_t begin;
  int64_t end;
};

struct TimelineOptions {
  bool mark_cycles = false;
  int rank = 0;
  int64_t zero = 0;     // now_ns() that the file's times count from
  std::string members;  // of the file's outer object, JSON
};

class TraceRows;

class Timeline {
 public:
  // Whether operations that begin now are to be recorded. The only thing that costs when nothing is.
  static bool on() { return on_.load(std::memory_order_relaxed); }
  static bool marks_cycles() { return marks_cycles_.load(std::memory_order_relaxed); }
  // The process's one timeline.
  static Timeline& instance();

  // Throws Error if it is started already; returns an errno if the file cannot be written.
  int start(FileDescriptor file, const TimelineOptions& options);
  // Writes what is there and ends; returns the errno that ended it earlier, or 0. Without effect when not started.
  int stop();
  // Between start() and stop(), even if it has ended itself for want of disk space.
  bool started();

  // A record of this session, begun now, or null when the timeline is off.
  std::unique_ptr<FlightRecord> record();
  uint64_t session() const { return session_.load(std::memory_order_relaxed); }
  // Of an earlier session: is dropped.
  void add(std::unique_ptr<FlightRecord> flight);
  void add(AwakeRecord awake);

  // While one of these lives, `flag` in the memory shared by a host counts the timelines that need its ranks' stamps.
  class Interest {
   public:
    explicit Interest(std::atomic<uint32_t>& flag);
    Interest(const Interest&) = delete;
    Interest& operator=(const Interest&) = delete;
    ~Interest();

   private:
    std::atomic<uint32_t>& flag_;
  };

 private:
  struct Batch {
    std::vector<std::unique_ptr<FlightRecord>> flights;
    std::vector<AwakeRecord> awake;
    uint64_t dropped = 0;
    size_t weight = 0;  // parts
    void clear();
  };
  Timeline() = default;
  void end_recording();
  void run(TraceFile file, TraceRows rows);
  bool forked() const;

  inline static std::atomic<bool> on_{false};
  inline static std::atomic<bool> marks_cycles_{false};
  std::atomic<uint64_t> session_{0};

  std::mutex control_;  // start() and stop(), one at a time
  std::mutex mutex_;    // guards the members of this paragraph
  std::condition_variable news_;
  Batch batch_;
  std::vector<std::unique_ptr<FlightRecord>> spare_;  // to be used again, with the memory that they hold
  bool stopping_ = false;
  bool active_ = false;  // records are taken
  bool started_ = false;
  int failure_ = 0;
  std::vector<std::atomic<uint32_t>*> interests_;

  std::thread writer_;
  pid_t process_ = 0;  // that started one
};

}  // namespace mykv
