// Codes of one and two bits.
#pragma once

#include "compress/loops/pack.h"

namespace mykv::compress {
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
