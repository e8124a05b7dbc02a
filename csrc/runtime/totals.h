// What a rank has done in a group, for the statistics: its operations, their bytes and how long it waited.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "operations/request.h"

namespace mykv {

// Operations that have ended with a result.
struct Totals {
  enum Way : uint8_t { in_place, copied, staged, nccl };
  static constexpr std::array<const char*, 4> kWays = {"in_place", "copied", "through_host", "nccl"};
  struct Count {
    uint64_t operations = 0;
    uint64_t bytes = 0;
  };

  static Way way_of(const Request& request) {
    if (request.operation.road == Road::nccl) return nccl;
    if (request.operation.road == Road::staged) return staged;
    return request.in_place ? in_place : copied;
  }
  // An operation has met at all ranks after this time. Later it ends.
  void met(const Request& request, int64_t waited) {
    waited_ns += waited;
    if (request.step == StepPart::last) step_waited_ns += waited;
  }
  void ended(const Request& request) {
    Count& count = ways[way_of(request)];
    ++count.operations;
    count.bytes += request.operation.bytes();
    steps += request.step == StepPart::last;
  }

  std::array<Count, 4> ways;
  int64_t waited_ns = 0;
  int64_t step_waited_ns = 0;  // of the operations that are StepPart::last
  uint64_t steps = 0;
};

}  // namespace mykv
