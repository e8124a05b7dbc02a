// The clock of the core.
#pragma once

#include <chrono>
#include <cstdint>
#include <ctime>

namespace mykv {

// Nanoseconds of a clock that all processes of a host share.
inline int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }

// The same clock with a resolution of a few milliseconds. Reading it costs only a few nanoseconds, since every
// operation reads it for its age.
inline int64_t coarse_now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return int64_t{now.tv_sec} * 1000000000 + now.tv_nsec;
}

}  // namespace mykv
