// One rank's share of an operation, as the layers above post it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/forks.h"
#include "gpu/device.h"
#include "operations/operation.h"

namespace mykv {

// A range of an operation's elements. A span is memory that holds some of the elements.

struct Range {
  size_t begin;
  size_t end;
  size_t count() const { return end - begin; }
};

// Calls use(span, common elements) for each span that shares elements with the range.
template <class Span, class Use>
void for_overlaps(const std::vector<Span>& spans, const Range& range, Use&& use) {
  auto span =
      std::partition_point(spans.begin(), spans.end(), [&](const Span& p) { return p.begin + p.count <= range.begin; });
  for (; span != spans.end() && span->begin < range.end; ++span) {
    use(*span, Range{std::max(range.begin, span->begin), std::min(range.end, span->begin + span->count)});
  }
}

// The address of an element in a span that holds it.
template <class Span>
char* address_in(const Span& span, size_t element, size_t width) {
  return static_cast<char*>(const_cast<void*>(static_cast<const void*>(span.data))) + (element - span.begin) * width;
}

// The address of the range if a single span holds all of it, or null.
template <class Span>
char* one_span(const std::vector<Span>& spans, const Range& range, size_t width) {
  char* found = nullptr;
  for_overlaps(spans, range, [&](const Span& span, const Range& both) {
    if (both.count() == range.count()) found = address_in(span, range.begin, width);
  });
  return found;
}

// Marks the sums of a training step, and the operations after its updates. Used only for statistics.

enum class StepPhase : uint8_t {
  none,
  some,
  last,     // the sum of the gradients that backward writes last: when they are ready, backward has ended
  weights,  // not a sum: updated weights, copied from their owners
};

// Phase of the thread's next operations. Python sets it around the calls of a step.
inline thread_local StepPhase next_step_phase = StepPhase::none;

// Phase of this thread's next request. A step has one request that is `last`; the requests after it are `some`.
inline StepPhase take_step_phase() {
  const StepPhase phase = next_step_phase;
  if (phase == StepPhase::last) next_step_phase = StepPhase::some;
  return phase;
}

// Numbers operations in the order of a rank's calls, and keeps track of the oldest operation that has not ended.
// Operations begin in a different order: by readiness in MXNet's engine, and by priority.

class Tickets;

// An operation's number in the order of calls. The operation has ended when its ticket is destroyed.
class Ticket {
 public:
  Ticket(std::shared_ptr<Tickets> tickets, uint64_t number);
  ~Ticket();
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;

  uint64_t number() const { return number_; }
  // Whether this ticket is the oldest that has not ended, or its number is less than `window` after the oldest's.
  bool within(uint64_t window) const;

 private:
  const std::shared_ptr<Tickets> tickets_;
  const uint64_t number_;
};

// Thread-safe.
class Tickets : public std::enable_shared_from_this<Tickets> {
 public:
  std::shared_ptr<const Ticket> take();
  // The number of the oldest ticket that has not ended; if all have ended, the number of the next ticket.
  uint64_t oldest() const { return oldest_.load(std::memory_order_relaxed); }

 private:
  friend class Ticket;
  void end(uint64_t number);

  const uint32_t forks_ = fork_number();
  std::mutex mutex_;
  std::deque<bool> ended_;  // whether each ticket has ended, from number oldest_ on
  std::atomic<uint64_t> oldest_{0};
};

// Elements [begin, begin + count) of an operation, at the address `data`. A source is read, a target is written.
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

// Elements [begin, begin + count) of an operation, and their root.
struct Shard {
  size_t begin = 0;
  size_t count = 0;
  int32_t root = 0;
};

// The GPUs that hold the memory of a request.
struct DeviceMemory {
  std::vector<int> inputs;   // the GPU of each input; of a scattered request, of each source
  std::vector<int> outputs;  // the GPU of each output or target
  int device = -1;  // the GPU that runs the operation if there are no inputs and outputs; -1: any GPU of this rank
  // Events that must have happened before the memory is read or written. They order the request after work in other
  // streams.
  std::vector<std::shared_ptr<const gpu::Event>> after;
};

struct Request {
  std::string name;                      // ranks match requests by name ...
  uint64_t turn = 0;                     // ... and turn: the number of the call under that name
  std::shared_ptr<const Ticket> ticket;  // null: treated as the oldest request
  std::string signature;                 // must be the same text on all ranks; shown in messages
  std::string refusal;                   // not empty: why this rank cannot take part in the operation
  StepPhase step = StepPhase::none;
  Operation operation;
  // If not null, the root of each shard replaces operation.root: a broadcast becomes an allgather, and a reduce becomes
  // a reduce-scatter. The shards are in order and cover all elements. The same on all ranks.
  std::shared_ptr<const std::vector<Shard>> shards;
  // Replicas on this rank's devices. allreduce: all inputs are summed. broadcast: only the root's first input is read.
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  // Instead of inputs and outputs: the share is gathered from `sources`, and the result scattered to `targets`. Neither
  // needs to cover all elements. Both are in the order of their elements. In a reduce only the root's targets are
  // written, in a broadcast only the root's sources are read.
  bool scattered = false;
  std::vector<Source> sources;
  std::vector<Target> targets;
  // Instead of inputs, outputs, sources and targets: the share is in the host's segment already, at this offset. The
  // result replaces it.
  std::optional<uint64_t> in_place;
  // If set, inputs, outputs, sources and targets are addresses on GPUs, and operation.road is their path.
  std::shared_ptr<const DeviceMemory> devices;
  std::shared_ptr<const void> owner;  // keeps the memory alive until done was called
  // Called once, from any thread: with null when outputs hold the result, otherwise with the cause.
  std::function<void(const Failure* error)> done;
  // A thread is about to wait for this request in Runtime::stand_in(), so the runtime's thread need not wake up for it.
  bool awaited = false;
  // The posting thread may spin briefly until this request is done, see Runtime::post().
  bool may_linger = false;
};

// Checks whether arrays of a request overlap in memory.

// Why a request's arrays cannot be read and written in place, in any order of their elements: an output overlaps an
// input or another output, and the common memory holds different elements of the two arrays. Empty: no such overlap.
std::string overlap_in_part(const Request& request);

}  // namespace mykv
