// The part of the host's segment in which one rank makes its slots. Every rank allocates in its own region only, so
// no allocator state is shared and a dead rank leaves no lock behind; the others address a slot by its offset.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "memory/free_ranges.h"
#include "memory/segment.h"

namespace mykv {

class Region {
 public:
  Region(const Segment& segment, size_t begin, size_t bytes) : segment_(segment), next_(begin), end_(begin + bytes) {}

  // An offset into the segment, 64-byte aligned, of at least `bytes`; throws Error when memory is out.
  size_t allocate(size_t bytes);
  // As allocate(), but of whole pages, and no memory is taken before Segment::commit().
  size_t reserve(size_t bytes);
  // Gives the slot back, `bytes` as it was asked for. Some memory is kept with its slots, since a training step asks
  // for the same sizes again and again.
  void release(size_t offset, size_t bytes);
  void release_reserved(size_t offset, size_t bytes);

 private:
  static size_t rounded(size_t bytes);
  size_t take(size_t size, bool commit);
  std::optional<size_t> take_free(size_t size, bool commit);
  std::optional<size_t> take_new(size_t size, bool commit);
  // The memory of these pages was given back.
  void free(size_t offset, size_t size);
  // Makes ranges of all slots that are free, but for those smaller than a page.
  void free_all();

  const Segment& segment_;
  std::mutex mutex_;
  size_t next_;  // nothing is taken from here on
  size_t end_;
  size_t committed_ = 0;
  // What is free: slots by rounded size, which still hold their memory or are mere addresses; large ones are ranges of
  // addresses, since they come in too many sizes. Where nothing else is left the others become ranges too.
  std::unordered_map<size_t, std::vector<size_t>> warm_;
  std::unordered_map<size_t, std::vector<size_t>> cold_;
  FreeRanges free_;
  size_t warm_bytes_ = 0;
};

}  // namespace mykv
