// Memory on one GPU that a trainer's gradients share.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "memory/region.h"
#include "memory/segment.h"

namespace mykv::gpu {

class Memory {
 public:
  // The memory is zeroed. Throws Error, with CUDA's error name, if the GPU has no memory left.
  Memory(int device, size_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // From now on, if this thread drops the last reference to memory, another thread frees it: cudaFree waits for all
  // work of the GPU.
  static void free_elsewhere();

  int device() const { return device_; }
  void* address() const { return address_; }
  size_t bytes() const { return bytes_; }

 private:
  const pid_t process_ = getpid();
  int device_;
  size_t bytes_;
  void* address_ = nullptr;
};

// Slots of this rank's region that are registered with CUDA (cudaHostRegister), so that copies between them and a GPU
// are asynchronous. Their pages are pinned: a slot is never released to the region, and the registered memory never
// shrinks.

// Not thread-safe.
class PinnedSlots {
 public:
  PinnedSlots(const Segment& segment, Region& region) : segment_(segment), region_(region) {}
  PinnedSlots(const PinnedSlots&) = delete;
  PinnedSlots& operator=(const PinnedSlots&) = delete;

  // The offset of a slot in the segment, aligned to a page; throws Error if no memory is left.
  size_t allocate(size_t bytes);
  // Releases a slot; `bytes` as in allocate(). No GPU may still read or write it.
  void release(size_t offset, size_t bytes) { free_[rounded(bytes)].push_back(offset); }
  // Unregisters all memory; only at the end, when no copy is under way.
  void unregister();
  // Why CUDA did not register some memory, so that copies block the calling thread; empty: all memory is registered.
  const std::string& problem() const { return problem_; }

 private:
  static size_t rounded(size_t bytes);

  const Segment& segment_;
  Region& region_;
  std::map<size_t, std::vector<size_t>> free_;  // offsets of free slots, by rounded size
  std::vector<size_t> registered_;              // offsets of registered memory
  std::string problem_;
};

}  // namespace mykv::gpu
