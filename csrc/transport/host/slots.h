// The arithmetic on the slots of a host: each rank's share of an operation lies in a slot of the shared segment.
#pragma once

#include <vector>

#include "transport/transport.h"

namespace mykv {

class Slots {
 public:
  Slots(char* base, HostTable& table) : base_(base), table_(table) {}

  char* slot(Entry& entry, int local_rank) const { return base_ + entry.records()[local_rank].slot; }

  // Elements [begin, end): all local ranks' shares reduced, written into every slot (allreduce) or into that of the
  // local rank `root` (reduce); or the root's share written into every slot (broadcast).
  void combine(Entry& entry, size_t begin, size_t end, int root) const;
  // The same of an allreduce or reduce whose owner's share is not in its slot.
  void combine_owned(Entry& entry, size_t begin, size_t end, const LocalShare& share) const;
  // Elements [begin, end): all shares reduced without scaling into the slot of `into` alone.
  void reduce_into(Entry& entry, size_t begin, size_t end, int into) const;
  // Elements [begin, end): the bits in the slot of `source` into every other slot.
  void spread(Entry& entry, size_t begin, size_t end, int source) const;

 private:
  void gather_pointers(Entry& entry, size_t begin, std::vector<void*>& pointers) const;

  char* base_;
  HostTable& table_;
};

}  // namespace mykv
