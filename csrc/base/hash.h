// A hash of bytes that is the same in every process. Ranks of one job exchange such hashes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mykv {

uint64_t hash_bytes(const void* data, size_t bytes, uint64_t seed);

}  // namespace mykv
