// How long nothing has moved while this process was running. Time for which it was stopped does not count: other
// processes may have been stopped with it.
#pragma once

#include <algorithm>
#include <chrono>

namespace mykv {

class Standstill {
 public:
  using Duration = std::chrono::steady_clock::duration;

  void end() {
    lasted_ = {};
    looked_ = std::chrono::steady_clock::now();  // the time before does not count in the next look()
  }
  // Call it often: at most one second of the time since the last call, or the last end(), counts.
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

}  // namespace mykv
