// How long a rank's thread stays awake for news that is about to come.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/clock.h"
#include "table/bell.h"

namespace mykv {

// To sleep and be woken costs tens of microseconds, on a virtual machine more than many operations take. After a small
// share has arrived the thread therefore stays awake for about as long as a wake-up takes: then it never loses more
// than twice the best (Karlin et al., "Empirical studies of competitive spinning for a shared-memory multiprocessor",
// 1991). It yields its core to whoever wants it all the while, and where it was disappointed several times it only
// tries now and then.
class Patience {
 public:
  // Where the ranks of the host outnumber its cores there is none: others need the core for the news to come.
  explicit Patience(int local_size);

  // Any thread: a share has arrived, and news of it may come soon. Whether the thread is to be woken for it.
  bool hope() {
    if (!has_core_) return false;
    if (hopes_.fetch_add(1, std::memory_order_relaxed) % kRareTurns != 0 &&
        credit_.load(std::memory_order_relaxed) <= 0) {
      return false;
    }
    until_.store(now_ns() + kSpinNs, std::memory_order_relaxed);
    return true;
  }

  // The thread: waits for the bell as long as there is hope; whether it rang.
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
