// The structure of all loops: blocks of 512 elements, which is a group of the shortest codes, and rows of 16. Loops
// over rows have constant bounds, so the compiler vectorizes them. Included once by each compress_*.cpp;
// everything is in an unnamed namespace and no std:: template is used, so that the linker can never take code compiled
// for one instruction set into another path.
//
// Every lane is plain IEEE arithmetic, and sums have a fixed order, hence the same bits on every path. Nothing here may
// be fused into a multiply-add; -ffp-contract=off keeps it so.
#pragma once

#include "compress/compress_path.h"

#define MYKV_INLINE static inline __attribute__((always_inline))

namespace mykv::compress {
namespace {

constexpr size_t kBlock = 512;
constexpr size_t kRow = kGroupWords;

template <typename To, typename From>
MYKV_INLINE To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

template <typename T>
constexpr Key<T> kMagnitude = static_cast<Key<T>>(~Key<T>{0}) >> 1;
template <typename T>
constexpr Key<T> kInfinity =
    sizeof(T) == 4 ? static_cast<Key<T>>(0x7f800000u) : static_cast<Key<T>>(0x7ff0000000000000u);

template <typename T>
MYKV_INLINE T magnitude(T value) {
  return bits_of<T>(bits_of<Key<T>>(value) & kMagnitude<T>);
}

// Calls use(block, begin) for each block of `values`; the last block is filled up with zeros.
template <typename T, typename Use>
MYKV_INLINE void for_blocks(const T* values, size_t count, Use&& use) {
  size_t begin = 0;
  for (; count - begin >= kBlock; begin += kBlock) use(values + begin, begin);
  if (begin == count) return;
  alignas(64) T padded[kBlock] = {};
  __builtin_memcpy(padded, values + begin, (count - begin) * sizeof(T));
  use(padded, begin);
}

// Calls make(block, begin), which fills the block, for each block of `values`; elements beyond the end are dropped.
template <typename T, typename Make>
MYKV_INLINE void fill_blocks(T* values, size_t count, Make&& make) {
  size_t begin = 0;
  for (; count - begin >= kBlock; begin += kBlock) make(values + begin, begin);
  if (begin == count) return;
  alignas(64) T padded[kBlock];
  make(padded, begin);
  __builtin_memcpy(values + begin, padded, (count - begin) * sizeof(T));
}

}  // namespace
}  // namespace mykv::compress
