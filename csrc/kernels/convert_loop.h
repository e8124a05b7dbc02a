// Converts between float32 and the 16-bit floats, for values that travel in a shorter type.
// Included once by each kernels_*.cpp, like vector_elements.h.
#pragma once

#include "kernels/instruction_set.h"
#include "kernels/vector_elements.h"

namespace mykv {
namespace {

constexpr size_t kPairFloats = kVectorBytes / 2;  // elements of a vector of halves
constexpr size_t kHalfOfPair = kPairFloats / 2;

template <typename Format>
MYKV_INLINE void store_floats(float* dst, FloatPair value) {
  float lanes[2][kHalfOfPair];
  __builtin_memcpy(lanes, &value, sizeof lanes);
  if constexpr (Format::kAlternate) {
    for (size_t i = 0; i < kHalfOfPair; ++i) {
      dst[2 * i] = lanes[0][i];
      dst[2 * i + 1] = lanes[1][i];
    }
  } else {
    __builtin_memcpy(dst, lanes, sizeof lanes);
  }
}

template <typename Format>
MYKV_INLINE FloatPair load_floats(const float* src) {
  float lanes[2][kHalfOfPair];
  if constexpr (Format::kAlternate) {
    for (size_t i = 0; i < kHalfOfPair; ++i) {
      lanes[0][i] = src[2 * i];
      lanes[1][i] = src[2 * i + 1];
    }
  } else {
    __builtin_memcpy(lanes, src, sizeof lanes);
  }
  FloatPair value;
  __builtin_memcpy(&value, lanes, sizeof lanes);
  return value;
}

template <typename Format>
static void widen_array(float* dst, const char* src, size_t count) {
  size_t i = 0;
  for (; count - i >= kPairFloats; i += kPairFloats) store_floats<Format>(dst + i, Format::widen(src + 2 * i));
  if (i == count) return;
  alignas(kVectorBytes) char padded[kVectorBytes] = {};
  float floats[kPairFloats];
  __builtin_memcpy(padded, src + 2 * i, 2 * (count - i));
  store_floats<Format>(floats, Format::widen(padded));
  __builtin_memcpy(dst + i, floats, sizeof(float) * (count - i));
}

// NaNs become the canonical NaN, since the bits of other NaNs could round to infinity.
template <typename Format>
MYKV_INLINE Bits narrow_floats(const float* src) {
  const FloatPair value = load_floats<Format>(src);
  return Format::narrow({scale_lanes<float>(value.first, 1), scale_lanes<float>(value.second, 1)});
}

template <typename Format>
static void narrow_array(char* dst, const float* src, size_t count) {
  size_t i = 0;
  for (; count - i >= kPairFloats; i += kPairFloats) {
    const Bits bits = narrow_floats<Format>(src + i);
    __builtin_memcpy(dst + 2 * i, &bits, sizeof bits);
  }
  if (i == count) return;
  float floats[kPairFloats] = {};
  __builtin_memcpy(floats, src + i, sizeof(float) * (count - i));
  const Bits bits = narrow_floats<Format>(floats);
  __builtin_memcpy(dst + 2 * i, &bits, 2 * (count - i));
}

template <typename Format>
static void convert_half(const ConvertCall& call) {
  if (call.to == DType::float32) {
    widen_array<Format>(reinterpret_cast<float*>(call.dst), call.src, call.count);
  } else {
    narrow_array<Format>(call.dst, reinterpret_cast<const float*>(call.src), call.count);
  }
}

static void convert_on_this_path(const ConvertCall& call) {
  const DType half = call.to == DType::float32 ? call.from : call.to;
  if (half == DType::float16) {
    convert_half<Float16Format>(call);
  } else {
    convert_half<BFloat16Format>(call);
  }
}

}  // namespace
}  // namespace mykv
