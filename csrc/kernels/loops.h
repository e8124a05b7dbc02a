// The loop every reduction runs: a block of a few vectors is accumulated in registers over all inputs, then stored to
// all outputs, so that each byte crosses the memory bus once in each direction and outputs may be inputs.
// Included once by each kernels_*.cpp, like vector_elements.h.
#pragma once

#include "kernels/instruction_set.h"
#include "kernels/vector_elements.h"

namespace mykv {
namespace {

// Enough vectors to hide the latency of additions. Blocks of 2 and 8 vectors, and software prefetching, were measured
// to be no faster.
constexpr size_t kBlockVectors = 4;

MYKV_INLINE void store(char* p, Bits value) { __builtin_memcpy(p, &value, sizeof value); }

template <typename E, ReduceOp op, size_t vectors>
MYKV_INLINE void reduce_block(const ReduceCall& call, size_t offset) {
  typename E::Acc acc[vectors];
  const char* first = call.inputs[0] + offset;
  for (size_t v = 0; v < vectors; ++v) acc[v] = E::load(first + v * kVectorBytes);
  for (int j = 1; j < call.n_inputs; ++j) {
    const char* input = call.inputs[j] + offset;
    for (size_t v = 0; v < vectors; ++v) acc[v] = E::template combine<op>(acc[v], E::load(input + v * kVectorBytes));
  }
  Bits result[vectors];
  for (size_t v = 0; v < vectors; ++v) result[v] = E::template finish<op>(acc[v], call.scale);
  for (int k = 0; k < call.n_outputs; ++k) {
    char* output = call.outputs[k] + offset;
    for (size_t v = 0; v < vectors; ++v) store(output + v * kVectorBytes, result[v]);
  }
}

// Fewer bytes than a vector: the same arithmetic on vectors padded with zeros.
template <typename E, ReduceOp op>
MYKV_INLINE void reduce_partial(const ReduceCall& call, size_t offset, size_t bytes) {
  alignas(kVectorBytes) char padded[kVectorBytes] = {};
  __builtin_memcpy(padded, call.inputs[0] + offset, bytes);
  typename E::Acc acc = E::load(padded);
  for (int j = 1; j < call.n_inputs; ++j) {
    __builtin_memcpy(padded, call.inputs[j] + offset, bytes);
    acc = E::template combine<op>(acc, E::load(padded));
  }
  const Bits result = E::template finish<op>(acc, call.scale);
  for (int k = 0; k < call.n_outputs; ++k) __builtin_memcpy(call.outputs[k] + offset, &result, bytes);
}

// Bytes before the outputs' first aligned address; 0 if they are not all aligned alike.
MYKV_INLINE size_t bytes_to_alignment(const ReduceCall& call) {
  const size_t misaligned = reinterpret_cast<uintptr_t>(call.outputs[0]) % kVectorBytes;
  for (int k = 1; k < call.n_outputs; ++k) {
    if (reinterpret_cast<uintptr_t>(call.outputs[k]) % kVectorBytes != misaligned) return 0;
  }
  return (kVectorBytes - misaligned) % kVectorBytes;
}

// A vector that straddles two cache lines costs twice as much. But alignment needs an extra partial vector at the
// beginning, so it pays only from about this many bytes.
constexpr size_t kAlignFromBytes = 2048;

template <typename E, ReduceOp op>
MYKV_INLINE size_t reduce_whole_vectors(const ReduceCall& call, size_t offset) {
  constexpr size_t kBlockBytes = kBlockVectors * kVectorBytes;
  for (; call.bytes - offset >= kBlockBytes; offset += kBlockBytes) {
    reduce_block<E, op, kBlockVectors>(call, offset);
  }
  for (; call.bytes - offset >= kVectorBytes; offset += kVectorBytes) {
    reduce_block<E, op, 1>(call, offset);
  }
  return offset;
}

template <typename E, ReduceOp op>
static void reduce_arrays(const ReduceCall& caller) {
  const ReduceCall call = caller;  // a local copy: the compiler knows that no store changes it
  size_t offset = 0;
  if (call.bytes >= kAlignFromBytes) {
    offset = bytes_to_alignment(call);
    if (offset != 0) reduce_partial<E, op>(call, 0, offset);
  }
  offset = reduce_whole_vectors<E, op>(call, offset);
  if (offset < call.bytes) reduce_partial<E, op>(call, offset, call.bytes - offset);
}

template <typename E>
static void reduce_elements(const ReduceCall& call) {
  switch (call.op) {
    case ReduceOp::sum:
      return reduce_arrays<E, ReduceOp::sum>(call);
    case ReduceOp::min:
      return reduce_arrays<E, ReduceOp::min>(call);
    case ReduceOp::max:
      return reduce_arrays<E, ReduceOp::max>(call);
    case ReduceOp::product:
      return reduce_arrays<E, ReduceOp::product>(call);
  }
}

static void reduce_on_this_path(const ReduceCall& call) {
  switch (call.dtype) {
    case DType::float32:
      return reduce_elements<FloatingElements<float>>(call);
    case DType::float64:
      return reduce_elements<FloatingElements<double>>(call);
    case DType::float16:
      return reduce_elements<HalfElements<Float16Format>>(call);
    case DType::bfloat16:
      return reduce_elements<HalfElements<BFloat16Format>>(call);
    case DType::uint8:
      return reduce_elements<IntegerElements<uint8_t, uint8_t>>(call);
    case DType::int8:
      return reduce_elements<IntegerElements<int8_t, uint8_t>>(call);
    case DType::uint16:
      return reduce_elements<IntegerElements<uint16_t, uint16_t>>(call);
    case DType::int16:
      return reduce_elements<IntegerElements<int16_t, uint16_t>>(call);
    case DType::uint32:
      return reduce_elements<IntegerElements<uint32_t, uint32_t>>(call);
    case DType::int32:
      return reduce_elements<IntegerElements<int32_t, uint32_t>>(call);
    case DType::uint64:
      return reduce_elements<IntegerElements<uint64_t, uint64_t>>(call);
    case DType::int64:
      return reduce_elements<IntegerElements<int64_t, uint64_t>>(call);
    case DType::bool8:
      return reduce_elements<BoolElements>(call);
  }
}

}  // namespace

// Converts between float32 and the 16-bit floats, for values sent in a shorter type.
// Included once by each kernels_*.cpp, like vector_elements.h.

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

// Adds up squares in float64. Included once by each kernels_*.cpp, like vector_elements.h.

namespace {

// Element i goes into sum i % kSquareSums on every path, so the bits are the same. A single sum would be bound by the
// latency of additions; 16 sums keep the adders of AVX-512, AVX2 and SSE2 busy.
constexpr size_t kSquareSums = 16;

// Hardware prefetching stops at the end of a page, and memory is slower than this loop. So the loop prefetches one page
// ahead: 50 MB take 0.6 times as long as without prefetching.
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
