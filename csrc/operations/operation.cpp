#include "operations/operation.h"

#include "base/hash.h"

namespace mykv {

Key make_key(const std::string& name, uint64_t turn, uint64_t part) {
  const uint64_t numbers[2] = {turn, part};
  const uint64_t seed = hash_bytes(numbers, sizeof numbers, 0);
  return {hash_bytes(name.data(), name.size(), seed), hash_bytes(name.data(), name.size(), ~seed)};
}

}  // namespace mykv
