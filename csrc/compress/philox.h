// Counter-based random numbers: the number of element i in step s does not depend on earlier draws or the instruction
// set. Philox4x32-10 of J. K. Salmon, M. A. Moraes, R. O. Dror and D. E. Shaw, "Parallel Random Numbers: As Easy as 1,
// 2, 3", SC 2011.
#pragma once

#include <cstdint>

namespace mykv::compress {

// Elements are counted in blocks of 64. In block b, element 16 * j + l has word j of the generator's output for the
// counter (16 * b + l, step, low word of stream, high word of stream), so that 16 counters are computed at once.
struct Draws {
  uint64_t seed = 0;  // the key: its low word, its high word
  uint32_t step = 0;
  uint64_t stream = 0;  // different streams have different numbers
};

constexpr uint32_t kDrawBlock = 64;

}  // namespace mykv::compress
