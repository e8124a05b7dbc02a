#include "memory/region.h"

#include <algorithm>

#include "runtime/error.h"

namespace mykv {

namespace {
constexpr int kSmallestClass = 8;              // 256 bytes: below that, cache lines and bookkeeping dominate
constexpr size_t kPage = 4096;                 // slots of a page and more start on a page
constexpr size_t kCommitStep = size_t{1} << 20;  // memory is taken from the system in steps of at least 1 MiB
}  // namespace

int Region::size_class(size_t bytes) {
  int c = kSmallestClass;
  while ((size_t{1} << c) < bytes) ++c;
  return c;
}

size_t Region::allocate(size_t bytes) {
  const int c = size_class(bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  if (!free_[c].empty()) {
    const size_t offset = free_[c].back();
    free_[c].pop_back();
    return offset;
  }
  const size_t size = size_t{1} << c;
  const size_t align = std::min(size, kPage);
  const size_t begin = (next_ + align - 1) / align * align;
  if (begin + size > end_) {
    throw Error("mykv's shared memory is used up: no room for a slot of " + std::to_string(size) + " bytes");
  }
  if (begin + size > committed_) {
    const size_t from = std::max(committed_, begin / kPage * kPage);
    const size_t to = std::min(end_, std::max(begin + size, from + kCommitStep));
    segment_.commit(from, to - from);
    committed_ = to;
  }
  next_ = begin + size;
  return begin;
}

void Region::release(size_t offset, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  free_[size_class(bytes)].push_back(offset);
}

}  // namespace mykv
