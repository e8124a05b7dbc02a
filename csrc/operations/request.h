// One rank's share of an operation, as the layers above post it.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gpu/device.h"
#include "operations/operation.h"
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
  std::vector<int> inputs;   // the GPU of each input; where it is scattered, of each source
  std::vector<int> outputs;  // of each output, or target
  int device = -1;           // where there is neither: the GPU that takes part; -1: any of this rank's
  // These must have happened before the memory is read or written. They order the request behind other streams.
  std::vector<std::shared_ptr<const gpu::Event>> after;
};

struct Request {
  std::string name;                      // what the ranks match by ...
  uint64_t turn = 0;                     // ... and which call under that name this is
  std::shared_ptr<const Ticket> ticket;  // null: as of the oldest
  std::string signature;                 // must be the same text on all ranks; stands in messages
  std::string refusal;                   // not empty: this rank cannot take part, and why
  Operation operation;
  // Not null: in place of operation.root each of these has a root. In their order they are all of the operation, so
  // that a broadcast is an allgather and a reduce a reduce-scatter. The same on all ranks.
  std::shared_ptr<const std::vector<Shard>> shards;
  // Replicas on this rank's devices. allreduce: all are summed. broadcast: only the first one, of the root, counts.
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  // Instead of inputs and outputs: the share is gathered from several places, and the result scattered to several;
  // neither need be all of it. Both are in the order of their elements. Of a reduce only the root's targets are
  // written, of a broadcast only the root's sources read.
  bool scattered = false;
  std::vector<Source> sources;
  std::vector<Target> targets;
  // Instead of all these: the share lies in the host's segment already, at this offset, and becomes the
  // result.
  std::optional<uint64_t> in_place;
  // Not null: all of inputs, outputs, sources and targets are addresses on GPUs; operation.road says how they meet.
  std::shared_ptr<const DeviceMemory> devices;
  std::shared_ptr<const void> owner;  // keeps the memory, until done was called
  // Called once, from any thread, when outputs hold the result or with the sentence that says why they do not.
  std::function<void(const std::string* error)> done;
};

}  // namespace mykv
