// When a rank did what for an operation, written into the shared table so that the timeline of one rank can tell who
// came late and who reduced.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "base/clock.h"

namespace mykv {

enum class Stamp : uint8_t {
  arrived,    // in the host's table
  begun,      // to reduce, or on several hosts to reduce its slice over its host
  scatter,    // its slice goes to the other hosts ...
  scattered,  // ... and theirs have come
  gather,     // the sums go to the other hosts ...
  gathered,   // ... and all are here
  finished,   // its share of the work
};
constexpr size_t kStamps = 7;

// One rank's stamps on one operation; 0 where it has none. Only that rank writes them, and what it wrote before the
// operation was done can be read after it. Before that a reader gets either value.
class Stamps {
 public:
  // The others count only for a rank that has this one.
  void forget_arrival() { at(Stamp::arrived).store(0, std::memory_order_relaxed); }
  void clear() {
    for (auto& time : times_) time.store(0, std::memory_order_relaxed);
  }
  void set(Stamp stamp) { at(stamp).store(now_ns(), std::memory_order_relaxed); }
  void set_once(Stamp stamp) {
    if (get(stamp) == 0) set(stamp);
  }
  int64_t get(Stamp stamp) const { return times_[static_cast<size_t>(stamp)].load(std::memory_order_relaxed); }

 private:
  std::atomic<int64_t>& at(Stamp stamp) { return times_[static_cast<size_t>(stamp)]; }

  std::array<std::atomic<int64_t>, kStamps> times_;
};

}  // namespace mykv
