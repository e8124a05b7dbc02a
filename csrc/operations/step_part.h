// Which operations are the sums of a training step, and which come after its updates. Only the statistics need it;
// nothing is decided by it.
#pragma once

#include <cstdint>

namespace mykv {

enum class StepPart : uint8_t {
  none,
  some,
  last,     // of the gradients that backward writes last: when they are there, backward has ended
  weights,  // no sum: the new weights, from the workers that have updated them
};

// Part of the operations that a thread asks for next. Python sets it around the calls of a step.
inline thread_local StepPart next_step_part = StepPart::none;

// Part of this thread's next request. A step has one request that is `last`; the requests after it are `some`.
inline StepPart take_step_part() {
  const StepPart part = next_step_part;
  if (part == StepPart::last) next_step_part = StepPart::some;
  return part;
}

}  // namespace mykv
