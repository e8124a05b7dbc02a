#include "operations/operation.h"

namespace mykv {

// FNV-1a over the bytes (Fowler, Noll, Vo), finished with the mixer of MurmurHash3 (Appleby) so that names that differ
// in the last character only still differ in every bit.
uint64_t hash_bytes(const void* data, size_t bytes, uint64_t seed) {
  uint64_t h = 0xcbf29ce484222325ULL ^ seed;
  const auto* p = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < bytes; ++i) h = (h ^ p[i]) * 0x100000001b3ULL;
  h = (h ^ (h >> 33)) * 0xff51afd7ed558ccdULL;
  h = (h ^ (h >> 33)) * 0xc4ceb9fe1a85ec53ULL;
  return h ^ (h >> 33);
}

Key make_key(const std::string& name, uint64_t turn, uint64_t part) {
  const uint64_t numbers[2] = {turn, part};
  const uint64_t seed = hash_bytes(numbers, sizeof numbers, 0);
  return {hash_bytes(name.data(), name.size(), seed), hash_bytes(name.data(), name.size(), ~seed)};
}

}  // namespace mykv
