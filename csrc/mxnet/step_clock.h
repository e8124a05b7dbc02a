// Times of training steps in this process, for the statistics: how long gradients were being summed, for how much of
// that time backward ran, and how long the updates took.
#pragma once

#include <cstdint>

namespace mykv::mxnet {

struct StepTimes {
  int64_t summing_ns = 0;     // some operation of a step was under way
  int64_t overlapped_ns = 0;  // the part of this time before backward had written the last gradients
  int64_t updating_ns = 0;    // from the sums until the updates of the weights had run
};

// Thread-safe. The engine's threads call these functions when they run operations of a step; other operations are
// ignored.
void note_sum_begins(bool last);
void note_sum_ends();
void note_updated();
StepTimes step_times();

}  // namespace mykv::mxnet
