// Reductions and copies over plain pointers, as fast as this CPU allows. The result depends only on the values: it has
// the same bits for any alignment, chunking, number of outputs and instruction set, because ranks with different CPUs
// and slices of different sizes must still hold identical weights.
#pragma once

#include <cstddef>
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
// double, truncated toward zero and saturated, NaN giving 0 (so 3 * (1. / 3) is 1; beyond 2^53 the low bits go). bool:
// any nonzero byte is true; sum and max are 'or', min and product are 'and', the result is 0 or 1, scale is not
// applied. min and max give NaN where any input is NaN (numpy.minimum and numpy.maximum, not fmin and fmax), and of two
// equal values the one of the earlier input (zeros of both signs). A NaN in a result is always the canonical quiet NaN,
// except in a plain copy (one input, scale 1), which keeps every bit.
void reduce(DType dtype, ReduceOp op, const void* const* inputs, int n_inputs, void* const* outputs, int n_outputs,
            size_t count, double scale);

// The type of what a part of the inputs gives, if the rest is reduced elsewhere: then sums and products of float16 and
// bfloat16 too are rounded once, and may be larger on the way than their type allows.
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

// Selects a path, or with 'best' the best path; false, and nothing changes, if the build or the CPU lacks it. Do not
// call it while another thread reduces.
bool select_kernel_path(const char* name);

}  // namespace mykv
