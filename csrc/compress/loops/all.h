// The table of the loops that are compiled for one instruction set.
#pragma once

#include "compress/loops/bits.h"
#include "compress/loops/dither.h"
#include "compress/loops/sparse.h"

namespace mykv::compress {
namespace {

// Sums over an array, the residual after compression, and the check that all elements are finite.

template <typename T>
static bool correct(T* corrected, const T* values, const T* residual, size_t count) {
  Key<T> finite[kRow];
  for (size_t l = 0; l < kRow; ++l) finite[l] = 1;
  const auto note = [&](T value, size_t l) __attribute__((always_inline)) {
    finite[l] &= static_cast<Key<T>>((bits_of<Key<T>>(value) & kMagnitude<T>) < kInfinity<T>);
  };
  size_t i = 0;
  if (residual != nullptr) {
    for (; count - i >= kRow; i += kRow) {
      T row[kRow];
      for (size_t l = 0; l < kRow; ++l) row[l] = values[i + l] + residual[i + l];
      for (size_t l = 0; l < kRow; ++l) note(row[l], l);
      __builtin_memcpy(corrected + i, row, sizeof row);
    }
    for (size_t l = 0; i < count; ++i, ++l) {
      corrected[i] = values[i] + residual[i];
      note(corrected[i], l);
    }
  } else {
    for (; count - i >= kRow; i += kRow) {
      T row[kRow];
      __builtin_memcpy(row, values + i, sizeof row);
      for (size_t l = 0; l < kRow; ++l) note(row[l], l);
      __builtin_memcpy(corrected + i, row, sizeof row);
    }
    for (size_t l = 0; i < count; ++i, ++l) {
      corrected[i] = values[i];
      note(values[i], l);
    }
  }
  Key<T> all = 1;
  for (size_t l = 0; l < kRow; ++l) all &= finite[l];
  return all != 0;
}

template <typename T>
static void subtract(T* out, const T* a, const T* b, size_t count) {
  for (size_t i = 0; i < count; ++i) out[i] = a[i] - b[i];
}

MYKV_INLINE double sum_of_lanes(const double* lanes) {
  double sum = 0;
  for (size_t l = 0; l < kRow; ++l) sum += lanes[l];
  return sum;
}

template <typename T>
static double sum_magnitudes(const T* values, size_t count) {
  double lanes[kRow] = {};
  size_t i = 0;
  for (; count - i >= kRow; i += kRow) {
    for (size_t l = 0; l < kRow; ++l) lanes[l] += static_cast<double>(magnitude(values[i + l]));
  }
  for (size_t l = 0; i < count; ++i, ++l) lanes[l] += static_cast<double>(magnitude(values[i]));
  return sum_of_lanes(lanes);
}

template <typename T>
static double sum_products(const T* a, const T* b, size_t count) {
  double lanes[kRow] = {};
  size_t i = 0;
  for (; count - i >= kRow; i += kRow) {
    for (size_t l = 0; l < kRow; ++l) lanes[l] += static_cast<double>(a[i + l]) * static_cast<double>(b[i + l]);
  }
  for (size_t l = 0; i < count; ++i, ++l) lanes[l] += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum_of_lanes(lanes);
}

template <typename T>
static T largest_magnitude(const T* values, size_t count) {
  T lanes[kRow] = {};
  const auto note = [&](T value, size_t l) __attribute__((always_inline)) {
    const T size = magnitude(value);
    lanes[l] = size > lanes[l] ? size : lanes[l];
  };
  size_t i = 0;
  for (; count - i >= kRow; i += kRow) {
    for (size_t l = 0; l < kRow; ++l) note(values[i + l], l);
  }
  for (size_t l = 0; i < count; ++i, ++l) note(values[i], l);
  T most = lanes[0];
  for (size_t l = 1; l < kRow; ++l) most = lanes[l] > most ? lanes[l] : most;
  return most;
}

}  // namespace

namespace {

template <typename T>
constexpr Loops<T> kLoops{
    correct<T>,        subtract<T>,       sum_magnitudes<T>, sum_products<T>, largest_magnitude<T>,
    encode_two_bit<T>, decode_two_bit<T>, encode_above<T>,   encode_sign<T>,  decode_sign<T>,
    encode_dither<T>,  decode_dither<T>,  collect<T>,
};

}  // namespace
}  // namespace mykv::compress
