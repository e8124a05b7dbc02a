#include "runtime/lookout.h"

#include <unistd.h>

#include <algorithm>

namespace mykv {

Lookout::Lookout(int local_size) : has_core_(local_size <= sysconf(_SC_NPROCESSORS_ONLN)) {}

void Lookout::moved() {
  if (awake_ && !slept_) credit_ = std::min(credit_ + 1, kMostCredit);
  since_ = Clock::now();
  awake_ = slept_ = false;
}

int64_t Lookout::pause(bool flowing, bool soon) {
  const auto waited = Clock::now() - since_;
  if (!slept_ && soon && has_core_ && waited < kAwake) {
    if (!awake_ && (credit_ > 0 || waits_++ % kRareTurns == 0)) awake_ = true;
    if (awake_) return 0;
  }
  if (awake_ && !slept_) credit_ = std::max(credit_ - 1, 0);
  slept_ = true;
  const int64_t part =
      std::chrono::duration_cast<std::chrono::microseconds>(waited - (flowing ? kFlow : Clock::duration::zero()))
          .count() /
      kPart;
  return std::clamp(part, kShortestUs, kLongestUs);
}

}  // namespace mykv
