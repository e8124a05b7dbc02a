// Translates a request into NCCL calls from array to array. Adds copies on the GPU if an array is in pieces that do not
// fit the calls, or is needed on GPUs that run no call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "operations/request.h"

namespace mykv {

// The GPUs on which a rank has the arrays of an operation. NCCL needs the placements of all ranks, and they may change
// from call to call. So each rank writes a digest of its placement to the host's table, and the placements themselves
// are exchanged only when the digest of all ranks is new (arrangements.h).

// The placement of one rank, as sent by MPI.
struct Placement {
  static constexpr size_t kMostDevices = 16;
  static constexpr size_t kBusIdBytes = 32;

  int32_t count = 0;
  int32_t primary = 0;  // index of the device that has the share of a root
  int32_t devices[kMostDevices] = {};
  char bus_ids[kMostDevices][kBusIdBytes] = {};
  uint64_t machine = 0;
  uint64_t layout = 0;      // for an allreduce in pieces: hash of where the pieces begin and end
  uint8_t whole_input = 0;  // one piece is the whole input
  uint8_t whole_output = 0;

  std::vector<int> list() const { return {devices, devices + count}; }
  // Digest of all fields except the bus ids, which follow from the devices. Not 0.
  uint64_t digest() const;
};

// `usual_device`: the device of a rank that brings no memory. Throws Error if the request has more than kMostDevices.
Placement placement_of(const Request& request, int rank, int usual_device);
// Adds the fields that only other ranks need.
void identify(Placement* placement);

struct PlannedCopy {
  void* to;
  const void* from;
  size_t bytes;
};

struct PlannedCall {
  enum class Kind { allreduce, reduce, broadcast, allgather, reducescatter, send, receive };
  Kind kind;
  const char* from;
  char* to;
  size_t count;  // elements, as NCCL counts them for this call
  int peer = 0;  // the root, or the other side of a send or receive: its NCCL rank
};

// The work of one GPU: the members `before`, `calls` and `after`, done in this order.
struct PlannedLane {
  size_t local = 0;  // index among this rank's GPUs in the communicator
  std::vector<PlannedCopy> before;
  std::vector<PlannedCall> calls;
  std::vector<PlannedCopy> after;
};

// Facts about the other ranks that the plan needs.
struct Neighbours {
  int rank = 0;
  // NCCL rank of each rank's primary GPU; empty: unknown, for a plan that only counts its memory.
  std::vector<int> nccl_ranks;
  bool same_layout = true;  // the pieces have the same bounds on all ranks
  bool one_each = false;    // every rank has one GPU
  bool whole_inputs = false;
  bool whole_outputs = false;
};

// Returns the address of `bytes` more bytes of scratch memory on a GPU.
using Scratch = std::function<char*(int device, size_t bytes)>;

// Valid only if overlap_in_part() is empty. `devices`: this rank's GPUs in the communicator; `primary`: the index of
// the GPU that has a root's share.
std::vector<PlannedLane> plan(const Request& request, const std::vector<int>& devices, size_t primary,
                              const Neighbours& neighbours, const Scratch& scratch);

}  // namespace mykv
