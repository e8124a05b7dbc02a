// Arithmetic on the slots of a host: each rank's share of an operation is in a slot of the shared segment.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "transport/transport.h"

namespace mykv {

// The number of bytes of each slot that a rank works on at a time. It is smaller for more ranks, so that the work on a
// piece stays about the same. The pieces of all slots, read and written, stay within a core's L2 cache.
inline size_t piece_bytes(int local_size) {
  constexpr size_t kPage = 4 << 10, kMost = 256 << 10;
  return std::clamp(2 * kMost / static_cast<size_t>(local_size) / kPage * kPage, kPage, kMost);
}

class Slots {
 public:
  Slots(char* base, HostTable& table) : base_(base), table_(table) {}

  char* slot(Entry& entry, int local_rank) const { return base_ + entry.records()[local_rank].slot; }

  // For elements [begin, end): reduces all local ranks' shares into every slot (allreduce) or into the slot of the
  // local rank `root` (reduce); or copies the root's share into every slot (broadcast).
  void combine(Entry& entry, size_t begin, size_t end, int root) const;
  // The same for an allreduce or reduce whose owner's share is not in a slot.
  void combine_owned(Entry& entry, size_t begin, size_t end, const LocalShare& share) const;
  // For elements [begin, end): reduces all shares, without scaling, into the slot of `into` only.
  void reduce_into(Entry& entry, size_t begin, size_t end, int into) const;
  // For elements [begin, end): reduces all shares, without scaling, into the memory at `to`, as values of
  // partial_type().
  void sum_into(Entry& entry, size_t begin, size_t end, char* to) const;
  // Copies the memory at `from` into every slot.
  void fill(Entry& entry, const char* from) const;
  // For elements [begin, end): copies the slot of `source` into every other slot.
  void spread(Entry& entry, size_t begin, size_t end, int source) const;

 private:
  void gather_pointers(Entry& entry, size_t begin, std::vector<void*>& pointers) const;

  char* base_;
  HostTable& table_;
};

}  // namespace mykv
