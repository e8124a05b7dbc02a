#include "table/event_log.h"

namespace mykv {

size_t EventLog::bytes() { return sizeof(Cell) * kEvents; }

void EventLog::append(const TableEvent& event) {
  const uint64_t tail = tail_.load(std::memory_order_relaxed);
  // A reader that sees an overwritten cell must also see the moved tail.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  Cell& cell = cells_[tail % kEvents];
  cell.type.store(event.type, std::memory_order_relaxed);
  cell.entry.store(event.entry, std::memory_order_relaxed);
  cell.generation.store(event.generation, std::memory_order_relaxed);
  tail_.store(tail + 1, std::memory_order_seq_cst);
}

bool EventLog::next(TableEvent* event, bool* overrun) {
  *overrun = false;
  const uint64_t tail = tail_.load(std::memory_order_seq_cst);
  if (head_ == tail) return false;
  const Cell& cell = cells_[head_ % kEvents];
  *event = {cell.type.load(std::memory_order_relaxed), cell.entry.load(std::memory_order_relaxed),
            cell.generation.load(std::memory_order_relaxed)};
  std::atomic_thread_fence(std::memory_order_acquire);
  // One cell of slack: a writer may be overwriting the oldest cell while this rank copies it.
  if (tail_.load(std::memory_order_relaxed) - head_ >= kEvents) {
    *overrun = true;
    head_ = tail;
    return true;
  }
  ++head_;
  return true;
}

}  // namespace mykv
