// The stall watch: reports which operations wait, for which ranks, since when; and ends them if abort_seconds is set.
// Usually it checks ages only; it looks up the missing ranks only for an operation that has waited for long.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "runtime/runtime.h"

namespace mykv {

struct StallLimits {
  double warn_seconds = 0;   // 0: never
  double abort_seconds = 0;  // 0: never
};

struct StallReport {
  bool over = false;  // the wait is over: operations continue
  std::string text;
};

// Watches one runtime; not thread-safe.
class StallWatch {
 public:
  // New reports since the last look. Of the ranks that wait for the same operation, the lowest reports. `stopped`:
  // seconds since the last look in which this process did not run. They do not count as waiting, since other processes
  // may have been stopped too.
  std::vector<StallReport> look(Runtime& runtime, const StallLimits& limits, double stopped);

 private:
  void warn(Runtime& runtime, double seconds, std::vector<StallReport>* reports);
  void abort(Runtime& runtime, double seconds, std::vector<StallReport>* reports);
  double counted() const { return longest_ - stopped_; }

  double longest_ = 0;       // age of the oldest operation at the last look
  double stopped_ = 0;       // seconds of `longest_` in which this process did not run
  double next_warning_ = 0;  // age at which to warn; doubles each time, so that a long stall does not fill the log
  bool warned_ = false;
  bool aborted_ = false;
};

}  // namespace mykv
