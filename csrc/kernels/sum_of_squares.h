// The sum of squares of an array, for norms.
#pragma once

#include <cstddef>

#include "kernels/dtype.h"

namespace mykv {

// Whether sum_of_squares takes this dtype: float16, bfloat16, float32 or float64.
bool has_squares(DType dtype);

// The sum of the squares of `count` elements, in float64. The order of the additions is fixed, but it depends on
// `count`: ranks that need the same bits must exchange their sums.
double sum_of_squares(DType dtype, const void* data, size_t count);

}  // namespace mykv
