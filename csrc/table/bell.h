// Sleeping and waking across processes, on futex words in shared memory. Every caller gives a time limit, so that it
// notices a dead rank instead of waiting for it.
#pragma once

#include <atomic>
#include <cstdint>

namespace mykv {

// Wakes the runtime thread of one rank. ring() is cheap when that thread is awake.
class Bell {
 public:
  uint32_t count() const { return count_.load(std::memory_order_seq_cst); }
  void ring();
  // Sleeps until ring() is called after count() returned `seen`, or until the time is over.
  void wait(uint32_t seen, int64_t timeout_us);

 private:
  std::atomic<uint32_t> count_{0};
  std::atomic<uint32_t> sleeping_{0};
};

}  // namespace mykv
