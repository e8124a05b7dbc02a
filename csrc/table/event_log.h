// The log of a host's table: which entries became ready and which are done. Every rank of the host reads it at its own
// pace.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace mykv {

struct TableEvent {
  enum class Type : uint32_t { made, announced, ready, done };  // made: written only if a rank has subscribed
  Type type;
  uint32_t entry;
  uint32_t generation;
};

// One rank's view of the log. The log is in shared memory and is zeroed at first.
class EventLog {
 public:
  static constexpr uint32_t kEvents = 1 << 18;  // a rank that lags further behind misses events
  static size_t bytes();
  // `tail`: how many events were ever written.
  EventLog(std::atomic<uint64_t>& tail, void* memory) : tail_(tail), cells_(static_cast<Cell*>(memory)) {}

  // Call it under the table's lock: one writer at a time.
  void append(const TableEvent& event);
  // The next event that this rank has not seen; false if there is none. `overrun` is set when the log was overwritten
  // before this rank read it: then *event is not valid, and the next call begins at the end of the log.
  bool next(TableEvent* event, bool* overrun);

 private:
  // A rank that lags far behind may read a cell while it is overwritten, and detects that afterwards.
  struct Cell {
    std::atomic<TableEvent::Type> type;
    std::atomic<uint32_t> entry;
    std::atomic<uint32_t> generation;
  };

  std::atomic<uint64_t>& tail_;
  Cell* const cells_;
  uint64_t head_ = 0;  // how many events this rank has seen
};

}  // namespace mykv
