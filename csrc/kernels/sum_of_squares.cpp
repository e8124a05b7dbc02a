#include "kernels/sum_of_squares.h"

#include <algorithm>

#include "kernels/kernels.h"

namespace mykv {
namespace {

// As many sums as keep the vector registers of every CPU busy. One sum would wait for itself in each addition.
constexpr size_t kLanes = 16;

template <typename Value>
double sum_of_values(const Value* values, size_t count) {
  double sums[kLanes] = {};
  const size_t whole = count - count % kLanes;
  for (size_t i = 0; i < whole; i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const double value = values[i + lane];
      sums[lane] += value * value;
    }
  }
  double total = 0;
  for (const double sum : sums) total += sum;
  for (size_t i = whole; i < count; ++i) {
    const double value = values[i];
    total += value * value;
  }
  return total;
}

double sum_of_narrow(DType dtype, const char* data, size_t count) {
  constexpr size_t kBlock = 1024;
  float values[kBlock];
  double total = 0;
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t some = std::min(kBlock, count - begin);
    convert(DType::float32, values, dtype, data + begin * item_size(dtype), some);
    total += sum_of_values(values, some);
  }
  return total;
}

}  // namespace

bool has_squares(DType dtype) {
  return dtype == DType::float16 || dtype == DType::bfloat16 || dtype == DType::float32 || dtype == DType::float64;
}

double sum_of_squares(DType dtype, const void* data, size_t count) {
  switch (dtype) {
    case DType::float32:
      return sum_of_values(static_cast<const float*>(data), count);
    case DType::float64:
      return sum_of_values(static_cast<const double*>(data), count);
    default:
      return sum_of_narrow(dtype, static_cast<const char*>(data), count);
  }
}

}  // namespace mykv
