// Says when nothing goes on: which operations wait, for which ranks, since when; and ends them if that is wanted.
// It looks at ages only; what keeps an operation is found out when one is old.
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
  bool over = false;  // it goes on again
  std::string text;
};

// Of one runtime, by one thread.
class StallWatch {
 public:
  // What is new since the last look. Of the ranks that wait for the same, the lowest speaks.
  std::vector<StallReport> look(Runtime& runtime, const StallLimits& limits);

 private:
  void warn(Runtime& runtime, double seconds, std::vector<StallReport>* reports);
  void abort(Runtime& runtime, double seconds, std::vector<StallReport>* reports);

  double longest_ = 0;       // age of the oldest operation at the last look
  double next_warning_ = 0;  // at this age; doubles with each, so that a long stall fills no log
  bool warned_ = false;
  bool aborted_ = false;
};

}  // namespace mykv
