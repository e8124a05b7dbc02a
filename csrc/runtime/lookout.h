// How often a thread polls a network, which cannot wake it.
#pragma once

#include <chrono>
#include <cstdint>

namespace mykv {

// For small operations the thread stays awake, as in Patience: it polls and yields its core in between, for about as
// long as a few wake-ups take on this host and others; it does so less often after waits in which nothing came. Then it
// sleeps for a fixed fraction (1 / kPart) of the time that it has waited. So the wait is at most longer by that
// fraction, and a long wait costs next to nothing.
class Lookout {
 public:
  explicit Lookout(int local_size);

  // Something arrived or was sent.
  void moved();
  // How long to sleep until the next poll (us), or 0 to poll again after yielding. `flowing`: bytes are on their way,
  // which some MPIs move only while a thread polls. `soon`: no large part is under way.
  int64_t pause(bool flowing, bool soon);

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr auto kAwake = std::chrono::microseconds(500);
  static constexpr auto kFlow = std::chrono::milliseconds(20);  // that a slow network may take for a whole message
  static constexpr int64_t kShortestUs = 50, kLongestUs = 2000, kPart = 8;
  static constexpr int kMostCredit = 4;
  static constexpr uint32_t kRareTurns = 64;

  const bool has_core_;
  Clock::time_point since_ = Clock::now();  // when something last moved
  bool awake_ = false;                      // the thread stays awake in this wait
  bool slept_ = false;
  int credit_ = kMostCredit;
  uint32_t waits_ = 0;
};

}  // namespace mykv
