// The log of a host's table: what became ready and what is done, for every rank of the host to read at its own pace.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace mykv {

struct TableEvent {
  enum class Type : uint32_t { made, announced, ready, done };  // made: only where a rank listens
  Type type;
  uint32_t entry;
  uint32_t generation;
};

// One rank's view of the log, which lies in shared memory and is zeros at first.
class EventLog {
 public:
  static constexpr uint32_t kEvents = 1 << 18;  // a rank that lags further behind finds them overwritten
  static size_t bytes();
  // `tail`: how many events were ever written.
  EventLog(std::atomic<uint64_t>& tail, void* memory) : tail_(tail), cells_(static_cast<Cell*>(memory)) {}

  // By one rank at a time.
  void append(const TableEvent& event);
  // The next event that this rank has not seen; false where there is none. `overrun` is set when the log was
  // overwritten before it was read: there is no event then, and the next one is new.
  bool next(TableEvent* event, bool* overrun);

 private:
  // A rank that lags far behind may read a cell while it is written anew, and finds that out after.
  struct Cell {
    std::atomic<TableEvent::Type> type;
    std::atomic<uint32_t> entry;
    std::atomic<uint32_t> generation;
  };

  std::atomic<uint64_t>& tail_;
  Cell* const cells_;
  uint64_t head_ = 0;  // how many this rank has seen
};

}  // namespace mykv
