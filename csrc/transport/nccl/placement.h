// The GPUs on which a rank has the arrays of an operation. NCCL needs the placements of all ranks, and they may change
// from call to call. So each rank brings a digest of its placement to the host's table, and the placements themselves
// are exchanged only when the digest of all ranks is new (arrangements.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "operations/request.h"

namespace mykv {

// The placement of one rank, as sent by MPI.
struct Placement {
  static constexpr size_t kMostDevices = 16;
  static constexpr size_t kBusIdBytes = 32;

  int32_t count = 0;
  int32_t primary = 0;  // index of the device that has the share of a root
  int32_t devices[kMostDevices] = {};
  char bus_ids[kMostDevices][kBusIdBytes] = {};
  uint64_t machine = 0;
  uint64_t layout = 0;      // of an allreduce in pieces: hash of where the pieces begin and end
  uint8_t whole_input = 0;  // one piece is the whole input
  uint8_t whole_output = 0;

  std::vector<int> list() const { return {devices, devices + count}; }
  // Digest of all fields but the bus ids, which follow from the devices. Not 0.
  uint64_t digest() const;
};

// `usual_device`: the device of a rank that brings no memory. Throws Error if the request has more than kMostDevices.
Placement placement_of(const Request& request, int rank, int usual_device);
// Adds the fields that only other ranks need.
void identify(Placement* placement);

}  // namespace mykv
