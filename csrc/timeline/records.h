// The timeline's records of operations and threads: times in nanoseconds of now_ns().
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace mykv {

// When a rank arrived, or a host, which is named by its first rank.
struct ArrivalRecord {
  int rank;
  int64_t time;
};

// Times are 0 for phases that did not happen.
struct PartRecord {
  struct Interval {
    int64_t begin = 0;
    int64_t end = 0;
  };
  uint32_t number = 0;
  Interval copy_in;
  Interval wait;
  Interval reduce;      // by any rank of the host
  Interval scatter;     // between hosts: values of this rank's slice
  Interval reduce_all;  // between hosts: reducing the received values
  Interval gather;      // between hosts: results
  Interval spread;      // copying the result into the slots of this host
  Interval copy_out;
  // Begin in RequestRecord::arrivals: first this host's ranks; then, on rank 0 of several hosts, the times at which
  // each host announced that all its ranks had arrived.
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
