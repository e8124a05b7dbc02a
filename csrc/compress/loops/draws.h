// Philox4x32-10, 16 counters side by side; see philox.h.
#pragma once

#include "compress/loops/blocks.h"

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
}  // namespace mykv::compress
