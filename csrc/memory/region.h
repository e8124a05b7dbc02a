// The part of the host's segment in which one rank allocates its slots. Every rank allocates in its own region only, so
// no allocator state is shared and a dead rank leaves no lock behind. Other ranks address a slot by its offset.
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
  // `keeps_memory`: whether memory stays with the segment when slots are released. It must if MPI sends and receives in
  // slots: a network card with RDMA keeps using the pages that MPI registered, and MPI does not notice if the kernel
  // replaces them.
  Region(const Segment& segment, size_t begin, size_t bytes, bool keeps_memory)
      : segment_(segment), keeps_memory_(keeps_memory), next_(begin), end_(begin + bytes) {}

  // Allocates a slot of at least `bytes`, 64-byte aligned, and returns its offset in the segment. Throws Error if no
  // memory is left.
  size_t allocate(size_t bytes);
  // As allocate(), but whole pages, which read as zeros and take no new memory before commit().
  size_t reserve(size_t bytes);
  // Like Segment::commit(), but after an Error the range has no memory, unless memory stays with the segment. Its
  // contents may be lost.
  void commit(size_t offset, size_t bytes) const;
  // Releases a slot; `bytes` as in allocate(). Some released slots keep their memory, since training steps ask for the
  // same sizes again and again.
  void release(size_t offset, size_t bytes);
  void release_reserved(size_t offset, size_t bytes);

 private:
  void require_possible(size_t bytes) const;
  static size_t rounded(size_t bytes);
  size_t take(size_t size, bool commits);
  std::optional<size_t> take_free(size_t size, bool commits);
  std::optional<size_t> take_new(size_t size, bool commits);
  // Adds pages to the free ranges.
  void free(size_t offset, size_t size);
  void discard(size_t offset, size_t size) const;
  // Turns all free slots into ranges, except slots smaller than a page.
  void free_all();

  const Segment& segment_;
  const bool keeps_memory_;
  std::mutex mutex_;
  size_t next_;  // addresses from here on were never taken, or are free again
  size_t end_;
  size_t committed_ = 0;
  // Free slots by rounded size: warm_ slots still have memory, cold_ slots are only addresses. Large free slots are
  // ranges of addresses, since they have too many sizes. If no other addresses are left, warm and cold slots become
  // ranges too.
  std::unordered_map<size_t, std::vector<size_t>> warm_;
  std::unordered_map<size_t, std::vector<size_t>> cold_;
  FreeRanges free_;
  size_t warm_bytes_ = 0;
};

}  // namespace mykv
