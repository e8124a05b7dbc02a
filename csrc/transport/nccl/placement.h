// On which GPUs the ranks have the arrays of an operation. NCCL needs to know that of all ranks, and it may change from
// call to call; so each rank brings a digest of its own to the host's table, and what a digest of all stands for is
// exchanged when it is new (arrangements.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "operations/request.h"

namespace mykv {

// Of one rank, as it travels by MPI.
struct Placement {
  static constexpr size_t kMostDevices = 16;
  static constexpr size_t kBusIdBytes = 32;

  int32_t count = 0;
  int32_t primary = 0;  // which of them has the share of a root
  int32_t devices[kMostDevices] = {};
  char bus_ids[kMostDevices][kBusIdBytes] = {};
  uint64_t machine = 0;
  uint64_t layout = 0;      // of an allreduce in pieces: where they begin and end
  uint8_t whole_input = 0;  // one piece is all of it
  uint8_t whole_output = 0;

  std::vector<int> list() const { return {devices, devices + count}; }
  // Of all but the bus ids, which follow from the devices. Not 0.
  uint64_t digest() const;
};

// `usual_device`: of a rank that brings no memory at all. Throws Error when the request has more devices than that.
Placement placement_of(const Request& request, int rank, int usual_device);
// Adds what only other ranks need.
void identify(Placement* placement);

}  // namespace mykv
