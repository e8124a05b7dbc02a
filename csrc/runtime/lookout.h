// How often a thread looks at a network, which cannot wake it.
#pragma once

#include <chrono>
#include <cstdint>

namespace mykv {

// What is small is waited for awake, as in Patience: the thread looks again at once and only yields its core, for about
// as long as a few wake-ups take on this host and others, and less often where it was disappointed. After that it
// sleeps for a fixed part of the time that it has waited: so the wait is that part longer at most, and a long one costs
// next to nothing.
class Lookout {
 public:
  explicit Lookout(int local_size);

  // Something came, or was sent on its way.
  void moved();
  // Until the next look: how long to sleep (us), or 0 to look again after yielding. `flowing`: bytes are on their way,
  // which an MPI moves only while somebody looks.
  // `soon`: nothing is under way that takes its time.
  int64_t pause(bool flowing, bool soon);

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr auto kAwake = std::chrono::microseconds(500);
  static constexpr auto kFlow = std::chrono::milliseconds(20);  // without a whole message, over a slow network
  static constexpr int64_t kShortestUs = 50, kLongestUs = 2000, kPart = 8;
  static constexpr int kMostCredit = 4;
  static constexpr uint32_t kRareTurns = 64;

  const bool has_core_;
  Clock::time_point since_ = Clock::now();  // nothing has moved
  bool awake_ = false;                      // in this wait
  bool slept_ = false;
  int credit_ = kMostCredit;
  uint32_t waits_ = 0;
};

}  // namespace mykv
