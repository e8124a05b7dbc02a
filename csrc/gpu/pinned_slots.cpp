#include "gpu/pinned_slots.h"

#include <algorithm>

#include "base/error.h"
#include "gpu/libraries.h"

namespace mykv::gpu {

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kAtOnce = 8;  // slots that are registered together: many pages take about as long as one page
constexpr size_t kLeast = size_t{256} << 10;

}  // namespace

// Powers of two, to have few sizes.
size_t PinnedSlots::rounded(size_t bytes) {
  size_t size = kPage;
  while (size < bytes) size *= 2;
  return size;
}

size_t PinnedSlots::allocate(size_t bytes) {
  const size_t size = rounded(bytes);
  std::vector<size_t>& free = free_[size];
  if (free.empty()) {
    const size_t all = std::max(kAtOnce * size, kLeast);
    const size_t begin = region_.reserve(all);
    try {
      segment_.commit(begin, all);
    } catch (const Error&) {
      region_.release_reserved(begin, all);
      throw;
    }
    const Cuda& api = cuda();
    try {
      api.check(api.host_register(segment_.base() + begin, all, Cuda::kHostRegisterPortable), "cudaHostRegister");
      registered_.push_back(begin);
    } catch (const Error& error) {
      api.get_last_error();
      problem_ = error.what();
    }
    for (size_t at = all; at >= size; at -= size) free.push_back(begin + at - size);
  }
  const size_t offset = free.back();
  free.pop_back();
  return offset;
}

void PinnedSlots::unregister() {
  for (const size_t begin : registered_) cuda().host_unregister(segment_.base() + begin);
  registered_.clear();
}

}  // namespace mykv::gpu
