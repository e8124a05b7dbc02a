// One rank's share of an operation, as the layers above post it.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "gpu/device.h"
#include "operations/operation.h"
#include "operations/step_part.h"
#include "operations/tickets.h"

namespace mykv {

// Elements [begin, begin + count) of an operation, in memory of their own.
struct Source {
  size_t begin = 0;
  size_t count = 0;
  const void* data = nullptr;
};
struct Target {
  size_t begin = 0;
  size_t count = 0;
  void* data = nullptr;
};

// Elements [begin, begin + count) of an operation, with a root of their own.
struct Shard {
  size_t begin = 0;
  size_t count = 0;
  int32_t root = 0;
};

// Where the memory of a request on GPUs lies.
struct DeviceMemory {
  std::vector<int> inputs;   // the GPU of each input; of a scattered request, of each source
  std::vector<int> outputs;  // the GPU of each output or target
  int device = -1;           // without inputs and outputs: the GPU that takes part; -1: any GPU of this rank
  // Events that must have happened before the memory is read or written. They order the request behind other streams.
  std::vector<std::shared_ptr<const gpu::Event>> after;
};

struct Request {
  std::string name;                      // ranks match requests by name ...
  uint64_t turn = 0;                     // ... and turn: the number of the call under that name
  std::shared_ptr<const Ticket> ticket;  // null: treated as the oldest request
  std::string signature;                 // must be the same text on all ranks; shown in messages
  std::string refusal;                   // not empty: why this rank cannot take part
  StepPart step = StepPart::none;
  Operation operation;
  // Not null: each shard has a root of its own, which replaces operation.root. The shards are in order and cover the
  // operation, so that a broadcast is an allgather and a reduce a reduce-scatter. The same on all ranks.
  std::shared_ptr<const std::vector<Shard>> shards;
  // Replicas on this rank's devices. allreduce: all inputs are summed. broadcast: only the root's first input is read.
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  // Instead of inputs and outputs: the share is gathered from `sources`, and the result scattered to `targets`. Neither
  // needs to cover all elements. Both are in the order of their elements. Of a reduce only the root's targets are
  // written, of a broadcast only the root's sources read.
  bool scattered = false;
  std::vector<Source> sources;
  std::vector<Target> targets;
  // Instead of inputs, outputs, sources and targets: the share lies in the host's segment already, at this offset. The
  // result replaces it.
  std::optional<uint64_t> in_place;
  // Not null: inputs, outputs, sources and targets are addresses on GPUs; operation.road says how they are combined.
  std::shared_ptr<const DeviceMemory> devices;
  std::shared_ptr<const void> owner;  // keeps the memory alive until done was called
  // Called once, from any thread: with null when outputs hold the result, otherwise with the cause.
  std::function<void(const Cause* error)> done;
  // A thread is about to wait for it by Runtime::stand_in(), so the runtime's thread need not be awake for it.
  bool awaited = false;
  // The thread that posts it may stay awake for it for a moment, see Runtime::post().
  bool may_linger = false;
};

}  // namespace mykv
