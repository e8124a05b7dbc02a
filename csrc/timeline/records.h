// The timeline's records of operations and threads: times in nanoseconds of now_ns().
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"

namespace mykv {

// The times of a rank's work on an operation. They are in the shared table, so that the timeline of every rank of the
// host can show which rank was late and which ranks reduced.

enum class Stamp : uint8_t {
  arrived,    // the rank arrived in the host's table
  begun,      // began to reduce; with several hosts: to reduce its slice over its host
  scatter,    // began to send its values to the other hosts ...
  scattered,  // ... and has received theirs
  gather,     // began to send its result to the other hosts ...
  gathered,   // ... and has received theirs
  finished,   // finished its share of the work
};
constexpr size_t kStamps = 7;

// One rank's stamps on one operation; 0: not set. Only that rank writes them. A reader that knows that the operation is
// done sees all stamps written until then. Any other reader may see an old value.
class Stamps {
 public:
  void clear() {
    for (auto& time : times_) time.store(0, std::memory_order_relaxed);
  }
  void set(Stamp stamp) { at(stamp).store(now_ns(), std::memory_order_relaxed); }
  void set_once(Stamp stamp) {
    if (get(stamp) == 0) set(stamp);
  }
  int64_t get(Stamp stamp) const { return times_[static_cast<size_t>(stamp)].load(std::memory_order_relaxed); }

 private:
  std::atomic<int64_t>& at(Stamp stamp) { return times_[static_cast<size_t>(stamp)]; }

  std::array<std::atomic<int64_t>, kStamps> times_;
};

// The two structs below are written to the file as they are in memory: fields of fixed size, without padding.

// When a rank arrived, or a host, named by its first rank.
struct ArrivalRecord {
  int64_t rank;
  int64_t time;
};

// Times are 0 for phases that did not happen.
struct PartRecord {
  struct Interval {
    int64_t begin = 0;
    int64_t end = 0;
  };
  uint32_t number = 0;
  // Index of this part's first arrival in RequestRecord::arrivals. The part's arrivals are those of this host's ranks.
  // On rank 0 of several hosts, the times follow at which each host announced that all its ranks had arrived.
  uint32_t arrivals = 0;
  uint32_t ranks = 0;
  uint32_t hosts = 0;
  Interval copy_in;
  Interval wait;
  Interval reduce;      // reducing, by any rank of the host
  Interval scatter;     // between hosts: exchanging the values of this rank's slice
  Interval reduce_all;  // between hosts: reducing the received values
  Interval gather;      // between hosts: exchanging the results
  Interval spread;      // copying the result into the slots of this host
  Interval copy_out;
};

struct RequestRecord {
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

  void clear() {
    error.clear();
    parts.clear();
    arrivals.clear();
  }
};

struct AwakeRecord {
  uint64_t session;
  std::string thread;
  int64_t begin;
  int64_t end;
};

}  // namespace mykv
