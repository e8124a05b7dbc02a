// What the timeline keeps of operations and of threads: times in nanoseconds of now_ns().
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace mykv {

// When a rank came, or a host, which goes by its first rank.
struct ArrivalRecord {
  int rank;
  int64_t time;
};

// 0 for what did not happen.
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
  // Among RequestRecord::arrivals: those of this host's ranks, then, on rank 0 of several hosts, when it heard of which
  // host that all its ranks are there.
  size_t arrivals = 0;
  uint32_t ranks = 0;
  uint32_t hosts = 0;
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
