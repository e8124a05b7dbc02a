#include "kernels/sum_of_squares.h"

#include <algorithm>

#include "kernels/float_mode.h"
#include "kernels/instruction_set.h"
#include "kernels/kernels.h"

namespace mykv {
namespace {

double sum_of_narrow(const KernelPath& path, DType dtype, const char* data, size_t count) {
  constexpr size_t kBlock = 1024;
  float values[kBlock];
  double total = 0;
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t some = std::min(kBlock, count - begin);
    convert(DType::float32, values, dtype, data + begin * item_size(dtype), some);
    total += path.squares({DType::float32, reinterpret_cast<const char*>(values), some});
  }
  return total;
}

}  // namespace

bool has_squares(DType dtype) {
  return dtype == DType::float16 || dtype == DType::bfloat16 || dtype == DType::float32 || dtype == DType::float64;
}

double sum_of_squares(DType dtype, const void* data, size_t count) {
  const KernelPath& path = kernels_in_use();
  const auto* values = static_cast<const char*>(data);
  const DefaultFloatMode mode;
  const bool narrow = dtype != DType::float32 && dtype != DType::float64;
  return narrow ? sum_of_narrow(path, dtype, values, count) : path.squares({dtype, values, count});
}

}  // namespace mykv
