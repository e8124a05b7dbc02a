#include "operations/request.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace mykv {

Ticket::Ticket(std::shared_ptr<Tickets> tickets, uint64_t number) : tickets_(std::move(tickets)), number_(number) {}

Ticket::~Ticket() { tickets_->end(number_); }

bool Ticket::within(uint64_t window) const {
  const uint64_t oldest = tickets_->oldest();
  return number_ == oldest || number_ < oldest + window;
}

std::shared_ptr<const Ticket> Tickets::take() {
  uint64_t number;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    number = oldest() + ended_.size();
    ended_.push_back(false);
  }
  return std::make_shared<const Ticket>(shared_from_this(), number);
}

void Tickets::end(uint64_t number) {
  if (fork_number() != forks_) return;  // in a fork, a thread that does not exist here may hold the lock forever
  std::lock_guard<std::mutex> lock(mutex_);
  uint64_t oldest = oldest_.load(std::memory_order_relaxed);
  ended_[number - oldest] = true;
  while (!ended_.empty() && ended_.front()) {
    ended_.pop_front();
    ++oldest;
  }
  oldest_.store(oldest, std::memory_order_relaxed);
}

namespace {

struct Memory {
  uintptr_t begin;
  uintptr_t end;
  uintptr_t element_0;  // the address at which element 0 of the operation would be; may wrap around
  bool written;
};

std::vector<Memory> memory_of(const Request& request) {
  const size_t width = item_size(request.operation.dtype);
  std::vector<Memory> memory;
  const auto add = [&](const void* data, size_t first, size_t count, bool written) {
    const auto begin = reinterpret_cast<uintptr_t>(data);
    if (count > 0) memory.push_back({begin, begin + count * width, begin - first * width, written});
  };
  for (const void* input : request.inputs) add(input, 0, request.operation.count, false);
  for (const void* output : request.outputs) add(output, 0, request.operation.count, true);
  for (const Source& source : request.sources) add(source.data, source.begin, source.count, false);
  for (const Target& target : request.targets) add(target.data, target.begin, target.count, true);
  return memory;
}

}  // namespace

std::string overlap_in_part(const Request& request) {
  std::vector<Memory> memory = memory_of(request);
  std::sort(memory.begin(), memory.end(), [](const Memory& a, const Memory& b) { return a.begin < b.begin; });
  // An alltoall moves elements: even with equal indices, the same memory holds different elements in input and output.
  const bool moves = request.operation.kind == Kind::alltoall;
  std::vector<Memory> open;  // memory that may reach into the next array
  for (const Memory& one : memory) {
    open.erase(std::remove_if(open.begin(), open.end(), [&](const Memory& m) { return m.end <= one.begin; }),
               open.end());
    for (const Memory& other : open) {
      const bool between = one.written != other.written;
      if (one.written && other.written && one.element_0 != other.element_0) return "its outputs overlap in part";
      if (between && (moves || one.element_0 != other.element_0)) return "its input and its output overlap in part";
    }
    open.push_back(one);
  }
  return "";
}

}  // namespace mykv
