// How long a rank's thread stays awake (spins) for an event that is expected soon.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/clock.h"
#include "table/bell.h"

namespace mykv {

// Sleeping and waking up costs tens of microseconds, on a virtual machine more than many operations take. After a small
// share has arrived the thread therefore stays awake for about as long as a wake-up takes: the cost is then at most
// twice the optimum (Karlin et al., "Empirical studies of competitive spinning for a shared-memory multiprocessor",
// 1991). While it spins it yields its core to other threads. After several waits in vain it spins only now and then.
class Patience {
 public:
  // With more ranks than cores on the host the thread never spins: other ranks need the core to make progress.
  explicit Patience(int local_size);

  // A share has arrived, and an event may follow soon. Whether to wake the thread for it. Thread-safe.
  bool hope() {
    if (!has_core_) return false;
    if (hopes_.fetch_add(1, std::memory_order_relaxed) % kRareTurns != 0 &&
        credit_.load(std::memory_order_relaxed) <= 0) {
      return false;
    }
    until_.store(now_ns() + kSpinNs, std::memory_order_relaxed);
    return true;
  }

  // Spins until the bell rings or the time is over; whether the bell rang. Only for the thread.
  bool wait(const Bell& bell, uint32_t seen);

 private:
  static constexpr int64_t kSpinNs = 100000;
  static constexpr int kMostCredit = 4;
  static constexpr uint32_t kRareTurns = 64;

  const bool has_core_;
  std::atomic<int64_t> until_{0};
  std::atomic<int> credit_{kMostCredit};
  std::atomic<uint32_t> hopes_{0};
};

}  // namespace mykv
