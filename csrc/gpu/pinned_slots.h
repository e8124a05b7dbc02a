// Slots of this rank's region that CUDA knows (cudaHostRegister), so that copies between them and a GPU run beside
// everything else. Such pages stay where they are: a slot is never given back to the region, and the memory that is
// registered at one time never shrinks.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "memory/region.h"
#include "memory/segment.h"

namespace mykv::gpu {

// For one thread.
class PinnedSlots {
 public:
  PinnedSlots(const Segment& segment, Region& region) : segment_(segment), region_(region) {}
  PinnedSlots(const PinnedSlots&) = delete;
  PinnedSlots& operator=(const PinnedSlots&) = delete;

  // An offset into the segment, on a page; throws Error when memory is out.
  size_t allocate(size_t bytes);
  // Gives a slot back, `bytes` as it was asked for. No GPU may still read or write it.
  void release(size_t offset, size_t bytes) { free_[rounded(bytes)].push_back(offset); }
  // At the end, when no copy is under way: CUDA forgets the memory.
  void unregister();
  // Why CUDA did not take some memory, with which copies hold up the thread that asks for them; empty: it took all.
  const std::string& problem() const { return problem_; }

 private:
  static size_t rounded(size_t bytes);

  const Segment& segment_;
  Region& region_;
  std::map<size_t, std::vector<size_t>> free_;  // by rounded size
  std::vector<size_t> registered_;              // offsets
  std::string problem_;
};

}  // namespace mykv::gpu
