// Random rounding to levels, linear or powers of two.
#pragma once

#include "compress/loops/bits.h"
#include "compress/loops/sparse.h"

namespace mykv::compress {
namespace {

template <typename T>
constexpr int kMantissaBits = sizeof(T) == 4 ? 23 : 52;
template <typename T>
constexpr int kExponentOfOne = sizeof(T) == 4 ? 127 : 1023;

// The number of the level below `steps`, its value, and the distance to the next level. `steps` is not negative.
template <bool natural, typename T>
MYKV_INLINE int32_t round_down(T steps, T* below, T* distance) {
  if constexpr (natural) {
    const bool one = steps >= T{1};
    const Key<T> bits = bits_of<Key<T>>(steps);
    const auto exponent = static_cast<int32_t>(bits >> kMantissaBits<T>) - kExponentOfOne<T>;
    const T power = bits_of<T>(bits & kInfinity<T>);
    *below = one ? power : T{0};
    *distance = one ? power : T{1};
    return one ? exponent + 1 : 0;
  } else {
    const auto number = static_cast<int32_t>(steps);
    *below = static_cast<T>(number);
    *distance = T{1};
    return number;
  }
}

// Encodes a block. The bits per code are not a template parameter, to limit instances and compile time.
template <bool natural, typename T>
static void encode_dither_block(uint32_t* codes, const T* block, const Dither<T>& dither, uint32_t first_draws) {
  alignas(64) uint32_t numbers[kBlock];
  for (uint32_t b = 0; b < kBlock / kDrawBlock; ++b) {
    draw_block(numbers + kDrawBlock * b, dither.draws, first_draws + b);
  }
  const T factor = dither.factor, most = dither.most;
  const int sign = dither.bits - 1;
  for (size_t i = 0; i < kBlock; ++i) {
    const T raw = magnitude(block[i]) * factor;
    const T steps = raw < most ? raw : most;
    T below, distance;
    const int32_t level = round_down<natural>(steps, &below, &distance);
    // 24 random bits, which a float holds exactly.
    const T chance = static_cast<T>(static_cast<int32_t>(numbers[i] >> 8)) * static_cast<T>(0x1p-24);
    const auto up = static_cast<int32_t>(chance * distance < steps - below);
    const auto negative = static_cast<uint32_t>(block[i] < T{0});
    codes[i] = static_cast<uint32_t>(level + up) | negative << sign;
  }
}

template <bool natural, typename T>
static void decode_dither_block(T* block, const uint32_t* codes, T step, int bits) {
  const uint32_t sign = uint32_t{1} << (bits - 1);
  for (size_t i = 0; i < kBlock; ++i) {
    const auto level = static_cast<int32_t>(codes[i] & (sign - 1));
    T steps;
    if constexpr (natural) {
      const auto exponent = static_cast<Key<T>>(level + kExponentOfOne<T> - 1);
      const T power = bits_of<T>(static_cast<Key<T>>(exponent << kMantissaBits<T>));
      steps = level != 0 ? power : T{0};
    } else {
      steps = static_cast<T>(level);
    }
    const T value = steps * step;
    block[i] = (codes[i] & sign) != 0 ? -value : value;
  }
}

static void pack_codes(uint32_t* words, const uint32_t* codes, size_t count, int bits) {
  switch (bits) {
    case 2:
      return pack_block<2>(words, codes, count);
    case 4:
      return pack_block<4>(words, codes, count);
    case 8:
      return pack_block<8>(words, codes, count);
    default:
      return pack_block<16>(words, codes, count);
  }
}

static void unpack_codes(uint32_t* codes, const uint32_t* words, size_t count, int bits) {
  switch (bits) {
    case 2:
      return unpack_block<2>(codes, words, count);
    case 4:
      return unpack_block<4>(codes, words, count);
    case 8:
      return unpack_block<8>(codes, words, count);
    default:
      return unpack_block<16>(codes, words, count);
  }
}

template <typename T>
static void encode_dither(uint32_t* words, const T* values, size_t count, const Dither<T>& dither) {
  alignas(64) uint32_t codes[kBlock];
  for_blocks(values, count, [&](const T* block, size_t begin) {
    const auto first = static_cast<uint32_t>(begin / kDrawBlock);
    if (dither.natural) {
      encode_dither_block<true>(codes, block, dither, first);
    } else {
      encode_dither_block<false>(codes, block, dither, first);
    }
    pack_codes(words + words_before(begin, dither.bits), codes, count - begin, dither.bits);
  });
}

template <typename T>
static void decode_dither(T* values, const uint32_t* words, size_t count, T step, int bits, bool natural) {
  alignas(64) uint32_t codes[kBlock] = {};
  fill_blocks(values, count, [&](T* block, size_t begin) {
    unpack_codes(codes, words + words_before(begin, bits), count - begin, bits);
    if (natural) {
      decode_dither_block<true>(block, codes, step, bits);
    } else {
      decode_dither_block<false>(block, codes, step, bits);
    }
  });
}

}  // namespace
}  // namespace mykv::compress
