// One shared memory segment per host. It is an anonymous memfd, so it has no name in any file system, is not limited by
// the size of /dev/shm, and vanishes with the last process that maps it, however that process ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/file_descriptor.h"

namespace mykv {

class Segment {
 public:
  Segment() = default;
  // The largest segment of this process in bytes (`ulimit -f`).
  static size_t largest();
  // Creates a segment of `bytes` of address space; memory is allocated only when touched or committed.
  // If the system allows no shared segment, it is private memory of this process, and *refused has the reason.
  static Segment create(size_t bytes, std::string* refused);
  // Maps the segment of a descriptor that another process handed over. Throws Error unless the segment has `bytes`
  // bytes and is sealed against shrinking.
  static Segment map(FileDescriptor fd, size_t bytes);
  // The same mapping for another rank that is a thread of this process; `other` must outlive it.
  static Segment borrow(const Segment& other);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment();

  char* base() const { return base_; }
  size_t bytes() const { return bytes_; }
  int fd() const { return fd_.get(); }

  // Allocates memory for [offset, offset + bytes) now, so that a lack of memory is an Error here, not a SIGBUS later.
  // After an Error some of the range may have memory.
  void commit(size_t offset, size_t bytes) const;
  // Gives the memory of whole pages back to the system; the pages read as zeros afterwards.
  void discard(size_t offset, size_t bytes) const;
  // Zeroes the pages that have memory, and keeps their memory.
  void clear(size_t offset, size_t bytes) const;
  // Never unmaps the segment: MPI, a GPU or another thread may still write to it.
  void keep_forever() { owned_ = false; }

 private:
  Segment(FileDescriptor fd, size_t bytes);

  FileDescriptor fd_;
  char* base_ = nullptr;
  size_t bytes_ = 0;
  bool owned_ = false;  // whether this object unmaps the segment at its end
};

}  // namespace mykv
