// Sleeping and waking across processes, on plain words in shared memory. Every wait has a time limit in its caller, so
// a dead rank is noticed instead of waited for.
#pragma once

#include <atomic>
#include <cstdint>

namespace mykv {

// Wakes the runtime thread of one rank. ring() is cheap when that thread is awake.
class Bell {
 public:
  uint32_t count() const { return count_.load(std::memory_order_seq_cst); }
  void ring();
  // Sleeps until ring() came after `seen` was read, or the time is over.
  void wait(uint32_t seen, int64_t timeout_us);

 private:
  std::atomic<uint32_t> count_{0};
  std::atomic<uint32_t> sleeping_{0};
};

}  // namespace mykv
