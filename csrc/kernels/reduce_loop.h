// The loop every reduction runs: a block of a few vectors is accumulated in registers over all inputs, then stored to
// all outputs, so that each byte crosses the memory bus once in each direction and outputs may be inputs.
// Included once by each kernels_*.cpp, like vector_elements.h.
#pragma once

#include "kernels/instruction_set.h"
#include "kernels/vector_elements.h"

namespace mykv {
namespace {

// Enough to hide the additions' latency; 2 and 8 measured the same or slower, as did software prefetch.
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

// A vector that straddles two cache lines costs twice, but so does the odd piece before the first whole line: aligning
// pays from about this many bytes.
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
}  // namespace mykv
