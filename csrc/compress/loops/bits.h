// The structure of all loops: blocks of 512 elements, which is a group of the shortest codes, and rows of 16. Loops
// over rows have constant bounds, so the compiler vectorizes them. Included once by each compress_*.cpp;
// everything is in an unnamed namespace and no std:: template is used, so that the linker can never take code compiled
// for one instruction set into another path.
//
// Every lane is plain IEEE arithmetic, and sums have a fixed order, hence the same bits on every path.
// -ffp-contract=off keeps the compiler from fusing a product and a sum, which would change bits.
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

// Packs short codes into words and unpacks them; see compress_path.h for the layout.

namespace {

// Packs those groups of a block that begin before element `count`, and writes their words.
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

// words = packed codes; code(codes, block) computes the codes of a block.
template <int bits, typename T, typename Code>
MYKV_INLINE void encode_blocks(uint32_t* words, const T* values, size_t count, Code&& code) {
  alignas(64) uint32_t codes[kBlock];
  for_blocks(values, count, [&](const T* block, size_t begin) __attribute__((always_inline)) {
    code(codes, block, begin);
    for (size_t i = count - begin; i < kBlock; ++i) codes[i] = 0;  // codes of the zeros that fill the last block
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

// Codes of one and two bits.

namespace {

template <typename T>
static void encode_two_bit(uint32_t* words, const T* values, size_t count, T threshold) {
  encode_blocks<2>(words, values, count, [=](uint32_t* codes, const T* block, size_t) __attribute__((always_inline)) {
    for (size_t i = 0; i < kBlock; ++i) {
      codes[i] = static_cast<uint32_t>(block[i] >= threshold) | static_cast<uint32_t>(block[i] <= -threshold) << 1;
    }
  });
}

template <typename T>
static void decode_two_bit(T* values, const uint32_t* words, size_t count, T threshold) {
  decode_blocks<2>(values, words, count, [=](uint32_t code) __attribute__((always_inline)) {
    const T up = (code & 1) != 0 ? threshold : T{0};
    return (code & 2) != 0 ? -threshold : up;
  });
}

template <typename T>
static void encode_above(uint32_t* words, const T* values, size_t count, T bound) {
  encode_blocks<1>(words, values, count, [=](uint32_t* codes, const T* block, size_t) __attribute__((always_inline)) {
    for (size_t i = 0; i < kBlock; ++i) codes[i] = static_cast<uint32_t>(block[i] > bound);
  });
}

template <typename T>
static void encode_sign(uint32_t* words, const T* values, size_t count) {
  encode_blocks<1>(words, values, count, [=](uint32_t* codes, const T* block, size_t) __attribute__((always_inline)) {
    for (size_t i = 0; i < kBlock; ++i) codes[i] = static_cast<uint32_t>(block[i] >= T{0});
  });
}

template <typename T>
static void decode_sign(T* values, const uint32_t* words, size_t count, T magnitude) {
  decode_blocks<1>(values, words, count,
                   [=](uint32_t code) __attribute__((always_inline)) { return code != 0 ? magnitude : -magnitude; });
}

}  // namespace
}  // namespace mykv::compress
