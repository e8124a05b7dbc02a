// Packs short codes into words and unpacks them; see compress_path.h for the layout.
#pragma once

#include "compress/loops/blocks.h"

namespace mykv::compress {
namespace {

// Writes the words of the groups of a block that begin before element `count`.
template <int bits>
MYKV_INLINE void pack_block(uint32_t* words, const uint32_t* codes, size_t count) {
  constexpr size_t elements = group_elements(bits);
  for (size_t group = 0; group * elements < kBlock && group * elements < count; ++group) {
    uint32_t packed[kGroupWords] = {};
    for (size_t j = 0; j < 32 / bits; ++j) {
      for (size_t w = 0; w < kGroupWords; ++w) packed[w] |= codes[group * elements + kRow * j + w] << (bits * j);
    }
    __builtin_memcpy(words + group * kGroupWords, packed, sizeof packed);
  }
}

template <int bits>
MYKV_INLINE void unpack_block(uint32_t* codes, const uint32_t* words, size_t count) {
  constexpr size_t elements = group_elements(bits);
  constexpr uint32_t mask = (uint32_t{1} << bits) - 1;
  for (size_t group = 0; group * elements < kBlock && group * elements < count; ++group) {
    uint32_t packed[kGroupWords];
    __builtin_memcpy(packed, words + group * kGroupWords, sizeof packed);
    for (size_t j = 0; j < 32 / bits; ++j) {
      for (size_t w = 0; w < kGroupWords; ++w) {
        codes[group * elements + kRow * j + w] = (packed[w] >> (bits * j)) & mask;
      }
    }
  }
}

// The index of the first word of the block that begins at `element`.
constexpr size_t words_before(size_t element, int bits) { return element / group_elements(bits) * kGroupWords; }

// words = the codes that code(codes, block) makes of each block.
template <int bits, typename T, typename Code>
MYKV_INLINE void encode_blocks(uint32_t* words, const T* values, size_t count, Code&& code) {
  alignas(64) uint32_t codes[kBlock];
  for_blocks(values, count, [&](const T* block, size_t begin) __attribute__((always_inline)) {
    code(codes, block, begin);
    for (size_t i = count - begin; i < kBlock; ++i) codes[i] = 0;  // of the zeros that fill the last block
    pack_block<bits>(words + words_before(begin, bits), codes, count - begin);
  });
}

// values = value(code) for each code.
template <int bits, typename T, typename Value>
MYKV_INLINE void decode_blocks(T* values, const uint32_t* words, size_t count, Value&& value) {
  alignas(64) uint32_t codes[kBlock] = {};
  fill_blocks(values, count, [&](T* block, size_t begin) __attribute__((always_inline)) {
    unpack_block<bits>(codes, words + words_before(begin, bits), count - begin);
    for (size_t i = 0; i < kBlock; ++i) block[i] = value(codes[i]);
  });
}

}  // namespace
}  // namespace mykv::compress
