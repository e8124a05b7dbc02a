// The times of a rank's work on an operation. They lie in the shared table, so that the timeline of any rank of the
// host can tell which rank was late and which rank reduced.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "base/clock.h"

namespace mykv {

enum class Stamp : uint8_t {
  arrived,    // in the host's table
  begun,      // began to reduce; on several hosts, to reduce its slice over its host
  scatter,    // began to send its values to the other hosts ...
  scattered,  // ... and has received theirs
  gather,     // began to send its result to the other hosts ...
  gathered,   // ... and has received theirs
  finished,   // its share of the work
};
constexpr size_t kStamps = 7;

// One rank's stamps on one operation; 0: not set. Only that rank writes them. Stamps written before the operation was
// done can be read after it; before that a reader gets the old or the new value.
class Stamps {
 public:
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
