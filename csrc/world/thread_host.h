// A host without MPI, whose ranks are threads of one process and share one mapping. So tools that see only one process,
// such as ThreadSanitizer, see all ranks.
#pragma once

#include <cstddef>

#include "memory/segment.h"
#include "table/entry.h"

namespace mykv {

// Memory for a host whose ranks are threads of this process. It outlives their worlds.
class ThreadHost {
 public:
  // `region_bytes`: address space for the slots of one rank, a multiple of 4096.
  ThreadHost(int size, size_t region_bytes, size_t table_capacity = kEntries);

  int size() const { return size_; }
  size_t region_bytes() const { return region_bytes_; }
  const Segment& segment() const { return segment_; }

 private:
  int size_;
  size_t region_bytes_;
  Segment segment_;
};

}  // namespace mykv
