#include "runtime/patience.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>

namespace mykv {

Patience::Patience(int local_size) : has_core_(local_size <= sysconf(_SC_NPROCESSORS_ONLN)) {}

bool Patience::wait(const Bell& bell, uint32_t seen) {
  const int64_t until = until_.load(std::memory_order_relaxed);
  if (now_ns() >= until) return false;
  bool rang = bell.count() != seen;
  while (!rang && now_ns() < until_.load(std::memory_order_relaxed)) {
    sched_yield();
    rang = bell.count() != seen;
  }
  const int credit = credit_.load(std::memory_order_relaxed);
  credit_.store(rang ? std::min(credit + 1, kMostCredit) : std::max(credit - 1, 0), std::memory_order_relaxed);
  return rang;
}

}  // namespace mykv
