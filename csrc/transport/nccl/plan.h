// What a request becomes: calls of NCCL's from array to array, and copies on the GPU where an array is in pieces that
// the calls do not fit, or wanted on GPUs that take no part.
#pragma once

#include <functional>
#include <vector>

#include "operations/request.h"

namespace mykv {

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
  int peer = 0;  // the root, or the other place
};

// On one GPU, in this order.
struct PlannedLane {
  size_t local = 0;  // which of this rank's GPUs in the communicator
  std::vector<PlannedCopy> before;
  std::vector<PlannedCall> calls;
  std::vector<PlannedCopy> after;
};

// What the plan must know of the other ranks.
struct Neighbours {
  int rank = 0;
  std::vector<int> places;  // of each rank's primary GPU; empty: unknown, for a plan that only tells of its memory
  bool same_layout = true;  // of pieces
  bool one_each = false;    // every rank has one GPU
  bool whole_inputs = false;
  bool whole_outputs = false;
};

// Memory on a GPU: the address of so many bytes more.
using Scratch = std::function<char*(int device, size_t bytes)>;

// Right only where the request has no overlap_in_part(). `devices`: this rank's in the communicator, of which `primary`
// has a root's share.
std::vector<PlannedLane> plan(const Request& request, const std::vector<int>& devices, size_t primary,
                              const Neighbours& neighbours, const Scratch& scratch);

}  // namespace mykv
