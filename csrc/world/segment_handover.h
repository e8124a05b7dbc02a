// Hands the host's shared segment from its creator to the other ranks of the host, over a Unix socket in the abstract
// namespace. Only processes of the same user that know this job's secret get it.
#pragma once

#include <mpi.h>

#include <string>

#include "memory/segment.h"

namespace mykv {

struct Handover {
  enum class Result : int {
    joined,    // this rank has the segment mapped
    separate,  // the ranks do not share a kernel, network namespace or user: this rank must look for other ranks
    failed,    // `failure` says why; empty on a rank that only learned that the first rank of its group failed
  };
  Result result = Result::joined;
  std::string failure;
  // On the first rank of a group, if it keeps its segment for itself: why the segment cannot be shared.
  std::string why_memory_is_not_shared;
  int rejected_callers = 0;  // on the first rank of a group: processes outside of this job that asked for its segment
  size_t bytes = 0;          // size of the segment
};

// Collective over `comm`. A failure is returned, not thrown, so that no rank waits for a rank that failed. Only a
// failed MPI call throws, on the rank whose call has failed; the other ranks wait in this function until that rank
// ends. Rank 0 creates a segment of its `bytes` bytes. The other ranks, whose `bytes` is not used, get the segment
// mapped in *segment. If the system allows no shared memory, rank 0 keeps its segment and the other ranks are separate.
Handover hand_over(MPI_Comm comm, size_t bytes, Segment* segment);

}  // namespace mykv
