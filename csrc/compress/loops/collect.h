// Finds the few elements with large keys. A row without such an element, as most rows are, costs one vector comparison.
#pragma once

#include "compress/loops/draws.h"

namespace mykv::compress {
namespace {

constexpr size_t kCollectBlock = 64;

// `keys` has room for kCollectBlock keys. Only the first `count` are used.
template <typename K>
MYKV_INLINE size_t collect_block(uint32_t* indices, K* found, const K* keys, size_t count, size_t begin, K bound) {
  size_t kept = 0;
  for (size_t row = 0; row < count; row += kRow) {
    K any = 0;
    for (size_t l = 0; l < kRow; ++l) any |= static_cast<K>(keys[row + l] >= bound);
    if (any == 0) continue;
    const size_t end = count - row < kRow ? count : row + kRow;
    for (size_t i = row; i < end; ++i) {
      if (keys[i] < bound) continue;
      indices[kept] = static_cast<uint32_t>(begin + i);
      found[kept++] = keys[i];
    }
  }
  return kept;
}

template <typename T>
static size_t collect(uint32_t* indices, Key<T>* found, const T* values, size_t count, Key<T> bound) {
  size_t kept = 0;
  alignas(64) Key<T> keys[kCollectBlock] = {};
  for (size_t begin = 0; begin < count; begin += kCollectBlock) {
    const size_t some = count - begin < kCollectBlock ? count - begin : kCollectBlock;
    __builtin_memcpy(keys, values + begin, some * sizeof(T));
    for (size_t i = 0; i < kCollectBlock; ++i) keys[i] &= kMagnitude<T>;
    kept += collect_block(indices + kept, found + kept, keys, some, begin, bound);
  }
  return kept;
}

static size_t collect_draws(uint32_t* indices, uint32_t* found, size_t count, const Draws& draws, uint32_t bound) {
  static_assert(kCollectBlock == kDrawBlock);
  size_t kept = 0;
  alignas(64) uint32_t keys[kCollectBlock];
  for (size_t begin = 0; begin < count; begin += kCollectBlock) {
    const size_t some = count - begin < kCollectBlock ? count - begin : kCollectBlock;
    draw_block(keys, draws, static_cast<uint32_t>(begin / kDrawBlock));
    for (size_t i = 0; i < kCollectBlock; ++i) keys[i] = ~keys[i];
    kept += collect_block(indices + kept, found + kept, keys, some, begin, bound);
  }
  return kept;
}

}  // namespace
}  // namespace mykv::compress
