#include "memory/region.h"

#include <algorithm>

#include "base/error.h"

namespace mykv {

namespace {

constexpr size_t kPage = 4096;                // slots of a page and more start on a page
constexpr size_t kSmallest = 256;             // below that, cache lines and bookkeeping dominate
constexpr size_t kCoarse = size_t{64} << 10;  // larger sizes are rounded up to multiples of it: few sizes
// Larger slots give their memory back to the system when they are released: gradients, not staging.
constexpr size_t kLarge = size_t{4} << 20;
constexpr size_t kMostWarm = size_t{16} << 20;   // free memory that is kept for the next operation
constexpr size_t kCommitStep = size_t{1} << 20;  // small slots take memory from the system in steps of at least 1 MiB

size_t round_up(size_t value, size_t step) { return (value + step - 1) / step * step; }

Error used_up(size_t bytes) {
  return Error("mykv's shared memory is used up: no room for a slot of " + std::to_string(bytes) +
                   " bytes. Drop arrays that are no longer used, or exchange smaller arrays",
               ErrorCode::no_memory);
}

}  // namespace

size_t Region::rounded(size_t bytes) {
  if (bytes > kLarge) return round_up(bytes, kPage);
  if (bytes > kCoarse) return round_up(bytes, kCoarse);
  if (bytes > kPage) return round_up(bytes, kPage);
  size_t size = kSmallest;
  while (size < bytes) size *= 2;
  return size;
}

// Checked before sizes are rounded up, which could overflow.
void Region::require_possible(size_t bytes) const {
  if (bytes > end_) throw used_up(bytes);
}

size_t Region::allocate(size_t bytes) {
  require_possible(bytes);
  return take(rounded(bytes), true);
}

size_t Region::reserve(size_t bytes) {
  require_possible(bytes);
  const size_t size = rounded(std::max(bytes, kLarge + 1));
  const size_t offset = take(size, false);
  if (keeps_memory_) segment_.clear(offset, size);
  return offset;
}

size_t Region::take(size_t size, bool commits) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (size <= kLarge) {
    std::vector<size_t>& warm = warm_[size];
    if (!warm.empty()) {
      const size_t offset = warm.back();
      warm.pop_back();
      warm_bytes_ -= size;
      return offset;
    }
    std::vector<size_t>& cold = cold_[size];
    if (!cold.empty()) {
      const size_t offset = cold.back();
      if (commits) commit(offset, size);
      cold.pop_back();
      return offset;
    }
  }
  std::optional<size_t> begin;
  // Free ranges are kept for large slots: a small slot would split a range for as long as the region exists. But ranges
  // that still have memory are used first.
  if (size > kLarge || (keeps_memory_ && size >= kPage)) begin = take_free(size, commits);
  if (!begin) begin = take_new(size, commits);
  if (!begin) {
    free_all();
    begin = take_free(size, commits);
  }
  if (!begin) begin = take_new(size, commits);
  if (!begin) throw used_up(size);
  return *begin;
}

std::optional<size_t> Region::take_free(size_t size, bool commits) {
  const size_t bytes = std::max(size, kPage);
  const std::optional<size_t> begin = free_.find(bytes);
  if (!begin) return std::nullopt;
  if (commits) commit(*begin, bytes);
  free_.take(*begin, bytes);
  for (size_t rest = size; rest < bytes; rest += size) {
    warm_[size].push_back(*begin + rest);
    warm_bytes_ += size;
  }
  return begin;
}

std::optional<size_t> Region::take_new(size_t size, bool commits) {
  const size_t begin = round_up(next_, std::min(size, kPage));
  if (begin > end_ || size > end_ - begin) return std::nullopt;
  if (commits && begin + size > committed_) {
    const size_t from = std::max(committed_, begin / kPage * kPage);
    const size_t to = std::min(end_, std::max(begin + size, from + (size > kLarge ? 0 : kCommitStep)));
    commit(from, to - from);
    committed_ = to;
  }
  next_ = begin + size;
  if (!commits) committed_ = std::max(committed_, next_);  // the owner of reserved memory commits it
  return begin;
}

void Region::commit(size_t offset, size_t bytes) const {
  try {
    segment_.commit(offset, bytes);
  } catch (...) {
    discard(offset, bytes);
    throw;
  }
}

void Region::release(size_t offset, size_t bytes) {
  const size_t size = rounded(bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  // Slots smaller than a page share their page with other slots.
  const bool keep = size < kPage || (size <= kLarge && warm_bytes_ + size <= kMostWarm);
  if (keep) {
    warm_bytes_ += size;
    warm_[size].push_back(offset);
    return;
  }
  discard(offset, size);
  if (size <= kLarge && !keeps_memory_) {
    cold_[size].push_back(offset);
  } else {
    free(offset, size);
  }
}

void Region::release_reserved(size_t offset, size_t bytes) { release(offset, std::max(bytes, kLarge + 1)); }

void Region::discard(size_t offset, size_t size) const {
  if (!keeps_memory_) segment_.discard(offset, size);
}

void Region::free(size_t offset, size_t size) {
  free_.add(offset, size);
  // A free range at the end becomes untaken address space again.
  next_ = free_.take_before(next_);
  committed_ = std::min(committed_, next_);
}

void Region::free_all() {
  for (auto& [size, offsets] : warm_) {
    if (size < kPage) continue;
    for (const size_t offset : offsets) {
      discard(offset, size);
      free(offset, size);
    }
    warm_bytes_ -= size * offsets.size();
    offsets.clear();
  }
  for (auto& [size, offsets] : cold_) {
    for (const size_t offset : offsets) free(offset, size);
    offsets.clear();
  }
}

}  // namespace mykv
