// Reductions and copies over plain pointers, as fast as this CPU allows. The result depends only on the values: it has
// the same bits for any alignment, chunking, number of outputs and instruction set, because ranks with different CPUs
// and slices of different sizes must still hold identical weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/dtype.h"

namespace mykv {

// outputs[k][i] = scale * (((inputs[0][i] op inputs[1][i]) op inputs[2][i]) ...) for every k and every i < count.
//
// inputs, outputs  n_inputs >= 1 and n_outputs >= 0 arrays, aligned to the item size. An output may be exactly one of
//                  the inputs (in place); arrays must not overlap in any other way.
// scale            applied once, to the final value; 1 leaves the value as it is.
//
// float16 and bfloat16 are accumulated and scaled in float32 and rounded once, to nearest even. float32 is scaled by
// float(scale), float64 in float64. Integers wrap around; with a scale they become double(value) * scale, rounded to a
// double, truncated toward zero and saturated, NaN giving 0 (so 3 * (1. / 3) is 1; beyond 2^53 low bits are lost).
// bool: any nonzero byte is true; sum and max are 'or', min and product are 'and', the result is 0 or 1, scale is not
// applied. min and max give NaN where any input is NaN (numpy.minimum and numpy.maximum, not fmin and fmax), and of two
// equal values (zeros of both signs) the value of the earlier input. A NaN in a result is always the canonical quiet
// NaN, except in a plain copy (one input, scale 1), which keeps every bit.
void reduce(DType dtype, ReduceOp op, const void* const* inputs, int n_inputs, void* const* outputs, int n_outputs,
            size_t count, double scale);

// The type of partial results, which are reduced further elsewhere: float32 for sums and products of float16 and
// bfloat16, so that the result is rounded only once, and partial results may exceed the range of the 16-bit type.
inline DType partial_type(DType dtype, ReduceOp op) {
  const bool half = dtype == DType::float16 || dtype == DType::bfloat16;
  return half && (op == ReduceOp::sum || op == ReduceOp::product) ? DType::float32 : dtype;
}

// memcpy of arrays that do not overlap (or are the same).
void copy(void* dst, const void* src, size_t bytes);

// dst[i] = src[i] in another type: one type is float32 or float64, the other is float16 or bfloat16. Rounds to nearest
// even (float64 by way of float32); narrowed NaNs become the canonical quiet NaN. Arrays are aligned to their items and
// do not overlap.
void convert(DType to, void* dst, DType from, const void* src, size_t count);

// The instruction set in use: 'avx512', 'avx2' or 'generic'; the best path unless another path was selected.
const char* kernel_path();

// Every path this build contains, best first. The CPU may not run all of them.
std::vector<const char*> kernel_paths_built();

// Selects a path, or with 'best' the best path. Returns false, and changes nothing, if the build or the CPU lacks the
// path. Do not call it while another thread reduces.
bool select_kernel_path(const char* name);

}  // namespace mykv

// How this thread's floating-point unit rounds.

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace mykv {

#if defined(__x86_64__)

inline unsigned read_float_mode() { return _mm_getcsr(); }
inline void write_float_mode(unsigned mode) { _mm_setcsr(mode); }
constexpr unsigned kUnusualModes = 0x8000 | 0x6000 | 0x0040;  // flush to zero, rounding mode, denormals are zero

#elif defined(__aarch64__)

inline uint64_t read_float_mode() {
  uint64_t mode = 0;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
inline void write_float_mode(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
constexpr uint64_t kUnusualModes =
    0x07c80000;  // alternative half, default NaN, flush to zero (also halves), rounding mode

#else

inline unsigned read_float_mode() { return 0; }
inline void write_float_mode(unsigned) {}
constexpr unsigned kUnusualModes = 0;

#endif

// Libraries built with -ffast-math leave their threads flushing subnormals to zero, and threads inherit that mode. Two
// ranks must not round differently because of it, so the kernels run with the default rounding and with subnormals.
class DefaultFloatMode {
 public:
  DefaultFloatMode() : saved_(read_float_mode()) {
    if ((saved_ & kUnusualModes) != 0) write_float_mode(saved_ & ~kUnusualModes);
  }
  ~DefaultFloatMode() {
    if ((saved_ & kUnusualModes) != 0) write_float_mode(saved_);
  }
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
  const decltype(read_float_mode()) saved_;
};

// The sum of squares of an array, for norms.

// Whether sum_of_squares takes this dtype: float16, bfloat16, float32 or float64.
bool has_squares(DType dtype);

// The sum of the squares of `count` elements, in float64. The order of the additions is fixed, but it depends on
// `count`: ranks that need the same bits must exchange their sums.
double sum_of_squares(DType dtype, const void* data, size_t count);

}  // namespace mykv
