// Philox4x32-10, 16 counters side by side; see compress_path.h.
#pragma once

#include "compress/loops/bits.h"

namespace mykv::compress {
namespace {

// numbers[64] = the random numbers of block `block`.
MYKV_INLINE void draw_block(uint32_t* numbers, const Draws& draws, uint32_t block) {
  constexpr uint64_t kMultiplier0 = 0xd2511f53, kMultiplier1 = 0xcd9e8d57;
  constexpr uint32_t kWeyl0 = 0x9e3779b9, kWeyl1 = 0xbb67ae85;
  uint32_t c0[kRow], c1[kRow], c2[kRow], c3[kRow];
  for (size_t l = 0; l < kRow; ++l) {
    c0[l] = block * static_cast<uint32_t>(kRow) + static_cast<uint32_t>(l);
    c1[l] = draws.step;
    c2[l] = static_cast<uint32_t>(draws.stream);
    c3[l] = static_cast<uint32_t>(draws.stream >> 32);
  }
  auto key0 = static_cast<uint32_t>(draws.seed), key1 = static_cast<uint32_t>(draws.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (size_t l = 0; l < kRow; ++l) {
      const uint64_t product0 = kMultiplier0 * c0[l], product1 = kMultiplier1 * c2[l];
      c0[l] = static_cast<uint32_t>(product1 >> 32) ^ c1[l] ^ key0;
      c2[l] = static_cast<uint32_t>(product0 >> 32) ^ c3[l] ^ key1;
      c1[l] = static_cast<uint32_t>(product1);
      c3[l] = static_cast<uint32_t>(product0);
    }
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  __builtin_memcpy(numbers, c0, sizeof c0);
  __builtin_memcpy(numbers + kRow, c1, sizeof c1);
  __builtin_memcpy(numbers + 2 * kRow, c2, sizeof c2);
  __builtin_memcpy(numbers + 3 * kRow, c3, sizeof c3);
}

}  // namespace

// Finds the few elements with large keys. A row without such an element, as most rows are, costs one vector comparison.

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
