#include "mxnet/step_clock.h"

#include <algorithm>
#include <mutex>

#include "base/clock.h"
#include "base/forks.h"

namespace mykv::mxnet {

namespace {

struct Clock {
  std::mutex mutex;
  StepTimes times;
  int under_way = 0;
  int64_t since = 0;      // the time until which `times` counts
  bool has_last = false;  // the last gradients are ready, and their step is under way
  int64_t summed = 0;     // when a sum last ended
  int64_t updated = 0;    // when a fence after updates last ran
};

Clock& step_clock() { return usable_in_forks<Clock>(); }

void add_time(Clock& clock, int64_t now) {
  const int64_t passed = clock.under_way > 0 ? now - clock.since : 0;
  clock.times.summing_ns += passed;
  if (!clock.has_last) clock.times.overlapped_ns += passed;
  clock.since = now;
}

}  // namespace

void note_sum_begins(bool last) {
  Clock& clock = step_clock();
  const std::lock_guard<std::mutex> lock(clock.mutex);
  add_time(clock, now_ns());
  ++clock.under_way;
  clock.has_last = clock.has_last || last;
}

void note_sum_ends() {
  Clock& clock = step_clock();
  const std::lock_guard<std::mutex> lock(clock.mutex);
  clock.summed = now_ns();
  add_time(clock, clock.summed);
  if (--clock.under_way == 0) clock.has_last = false;
}

// The updates of several fences run one after another, or at the same time: each moment counts once.
void note_updated() {
  Clock& clock = step_clock();
  const std::lock_guard<std::mutex> lock(clock.mutex);
  const int64_t now = now_ns();
  if (clock.summed == 0) return;
  clock.times.updating_ns += now - std::max(clock.summed, clock.updated);
  clock.updated = now;
}

StepTimes step_times() {
  Clock& clock = step_clock();
  const std::lock_guard<std::mutex> lock(clock.mutex);
  return clock.times;
}

}  // namespace mykv::mxnet
