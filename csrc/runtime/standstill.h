// How long nothing has moved while this process was awake: others may have been stopped with it, and need time too.
#pragma once

#include <algorithm>
#include <chrono>

namespace mykv {

class Standstill {
 public:
  using Duration = std::chrono::steady_clock::duration;

  void end() { lasted_ = {}; }
  // Call it often. Of the time since the last call a second at most counts.
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
