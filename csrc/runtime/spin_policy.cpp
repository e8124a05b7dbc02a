#include "runtime/spin_policy.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>

namespace mykv {

void SpinPolicy::Credit::report(bool paid) {
  const int credit = credit_.load(std::memory_order_relaxed);
  credit_.store(paid ? std::min(credit + 1, kMost) : std::max(credit - 1, 0), std::memory_order_relaxed);
}

SpinPolicy::SpinPolicy(int local_size) : has_core_(local_size <= sysconf(_SC_NPROCESSORS_ONLN)) {}

bool SpinPolicy::spin(const Bell& bell, uint32_t seen, int64_t until_ns) {
  const auto is_over = [&] { return now_ns() >= until_.load(std::memory_order_relaxed); };
  bool rang = false;
  if (!is_over()) {
    rang = bell.count() != seen;
    while (!rang && !is_over() && now_ns() < until_ns) {
      sched_yield();
      rang = bell.count() != seen;
    }
    if (!rang && !is_over()) return false;  // `until_ns` has ended this spin early: the next spin is counted instead
  }
  // Count each granted spin exactly once as paid or not, even if no thread spun.
  if (until_.exchange(0, std::memory_order_relaxed) != 0) bells_.report(rang);
  return rang;
}

void SpinPolicy::moved() {
  if (awake_ && !slept_) polls_.report(true);
  since_ = Clock::now();
  awake_ = slept_ = false;
}

int64_t SpinPolicy::pause(bool flowing, bool soon) {
  const auto waited = Clock::now() - since_;
  if (!slept_ && soon && has_core_ && waited < kAwake) {
    if (!awake_) awake_ = polls_.grant();
    if (awake_) return 0;
  }
  if (awake_ && !slept_) polls_.report(false);
  slept_ = true;
  const int64_t part =
      std::chrono::duration_cast<std::chrono::microseconds>(waited - (flowing ? kFlow : Clock::duration::zero()))
          .count() /
      kPart;
  return std::clamp(part, kShortestUs, kLongestUs);
}

}  // namespace mykv
