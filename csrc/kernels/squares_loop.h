// Adds up squares in float64. Included once by each kernels_*.cpp, like vector_elements.h.
#pragma once

#include "kernels/instruction_set.h"
#include "kernels/vector_elements.h"

namespace mykv {
namespace {

// Element i goes into sum i % kSquareSums on every path, so the bits are the same. One sum would wait for itself in
// each addition; 16 sums keep the adders of AVX-512, AVX2 and SSE2 busy.
constexpr size_t kSquareSums = 16;

// The CPU's own prefetching stops at the end of a page, and this loop is faster than memory: so it asks for cache lines
// one page ahead. 50 MB took 0.6 of the time without.
constexpr size_t kAheadBytes = 4096;
constexpr size_t kLineBytes = 64;

using Doubles = Vector<double>;
constexpr size_t kDoubles = kVectorBytes / sizeof(double);
constexpr size_t kDoubleVectors = kSquareSums / kDoubles;

template <typename T>
struct NarrowOf {
  typedef T type __attribute__((vector_size(kDoubles * sizeof(T))));
};

template <typename T>
static double sum_of_values(const T* values, size_t count) {
  using Narrow = typename NarrowOf<T>::type;  // as many elements as a vector of doubles has
  Doubles sums[kDoubleVectors] = {};
  const size_t whole = count - count % kSquareSums;
  for (size_t i = 0; i < whole; i += kSquareSums) {
    const char* const ahead = reinterpret_cast<const char*>(values + i) + kAheadBytes;
    for (size_t line = 0; line < kSquareSums * sizeof(T); line += kLineBytes) __builtin_prefetch(ahead + line);
    for (size_t v = 0; v < kDoubleVectors; ++v) {
      const char* const from = reinterpret_cast<const char*>(values + i + v * kDoubles);
      const Doubles wide = __builtin_convertvector(load_vector<Narrow>(from), Doubles);
      sums[v] += wide * wide;
    }
  }
  double lanes[kSquareSums];
  __builtin_memcpy(lanes, sums, sizeof lanes);
  double total = 0;
  for (size_t lane = 0; lane < kSquareSums; ++lane) total += lanes[lane];
  for (size_t i = whole; i < count; ++i) {
    const double value = static_cast<double>(values[i]);
    total += value * value;
  }
  return total;
}

static double squares_on_this_path(const SquaresCall& call) {
  if (call.dtype == DType::float32) return sum_of_values(reinterpret_cast<const float*>(call.values), call.count);
  return sum_of_values(reinterpret_cast<const double*>(call.values), call.count);
}

}  // namespace
}  // namespace mykv
