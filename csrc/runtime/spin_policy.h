// How a thread waits for an event that is expected soon. It spins first: going to sleep and waking up takes tens of
// microseconds, longer than many operations on a virtual machine. While it spins it yields its core.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

#include "base/clock.h"
#include "table/bell.h"

namespace mykv {

// Time without progress. Time during which this process was stopped does not count, since other processes may have
// been stopped with it.

class Standstill {
 public:
  using Duration = std::chrono::steady_clock::duration;

  void end() {
    lasted_ = {};
    looked_ = std::chrono::steady_clock::now();  // the next look() counts from here
  }
  // Returns the time without progress. Call it often: it counts at most one second since the last call of look() or
  // end().
  Duration look() {
    const auto now = std::chrono::steady_clock::now();
    lasted_ += std::min<Duration>(now - looked_, std::chrono::seconds(1));
    looked_ = now;
    return lasted_;
  }

 private:
  std::chrono::steady_clock::time_point looked_ = std::chrono::steady_clock::now();
  Duration lasted_{};
};

// The thread stays awake for about as long as a wake-up takes: the cost is then at most twice the optimum (Karlin et
// al., "Empirical studies of competitive spinning for a shared-memory multiprocessor", 1991). After several spins
// without success it spins only now and then. If the host has more ranks than cores, it never spins, since the other
// ranks need the cores to make progress.
class SpinPolicy {
 public:
  explicit SpinPolicy(int local_size);

  // Functions for waiting for other ranks of the host, which ring a bell.

  // This rank has arrived with a small share, so an event may follow soon. Returns whether spinning is likely to pay;
  // the caller then wakes the thread. Thread-safe.
  bool expect_bell() {
    if (!has_core_ || !bells_.grant()) return false;
    until_.store(now_ns() + kSpinNs, std::memory_order_relaxed);
    return true;
  }
  // Spins until the bell rings, until the granted time has passed, or until `until_ns` (now_ns()). Returns whether the
  // bell rang. Only for the runtime's thread.
  bool spin(const Bell& bell, uint32_t seen, int64_t until_ns);

  // Functions for waiting for a network, which cannot wake the thread, so the thread polls. Only for the runtime's
  // thread. For small operations it polls without sleeping for about as long as a few wake-ups take on this host and
  // others. Then it sleeps for a fixed fraction (1 / kPart) of the time that it has waited. So the wait is longer by at
  // most that fraction, and a long wait costs almost no processor time.

  // Something arrived or was sent.
  void moved();
  // How long to sleep until the next poll (us), or 0 to poll again after yielding. `flowing`: bytes are on their way,
  // which some MPIs move only while a thread polls. `soon`: no large part is under way.
  int64_t pause(bool flowing, bool soon);

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int64_t kSpinNs = 100000;
  static constexpr auto kAwake = std::chrono::microseconds(500);
  static constexpr auto kFlow = std::chrono::milliseconds(20);  // upper bound for one message on a slow network
  static constexpr int64_t kShortestUs = 50, kLongestUs = 2000, kPart = 8;

  // Counts whether recent spins paid, which means that the event came while the thread spun.
  class Credit {
   public:
    bool grant() {
      return credit_.load(std::memory_order_relaxed) > 0 ||
             refused_.fetch_add(1, std::memory_order_relaxed) % kRareTries == 0;
    }
    void report(bool paid);

   private:
    static constexpr int kMost = 4;
    static constexpr uint32_t kRareTries = 64;
    std::atomic<int> credit_{kMost};
    std::atomic<uint32_t> refused_{0};
  };

  const bool has_core_;
  Credit bells_;
  std::atomic<int64_t> until_{0};
  Credit polls_;
  Clock::time_point since_ = Clock::now();  // time of the last progress
  bool awake_ = false;                      // the thread spins in this wait
  bool slept_ = false;
};

}  // namespace mykv
