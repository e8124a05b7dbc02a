// Hands the host's shared segment from its maker to the other ranks of the host, over a Unix socket in the abstract
// namespace, to processes of the same user that know this job's token.
#pragma once

#include <mpi.h>

#include <string>

#include "memory/segment.h"

namespace mykv {

struct Handover {
  enum class Result : int {
    joined,    // this rank has the segment mapped
    separate,  // the ranks do not share a kernel, a network namespace or a user: this one must look elsewhere
    failed,    // `failure` says why; empty on ranks that only learned that their first rank failed
  };
  Result result = Result::joined;
  std::string failure;
  std::string lonely;  // of a first rank that keeps its segment for itself: why it cannot be shared
  int strangers = 0;   // of a first rank: processes that called for its segment and are none of this job
};

// Collective over `comm`, and never throws, so that no rank waits for one that failed. Rank 0 makes a segment of
// `bytes` bytes, the others get it mapped in *segment. Where the system lets nobody share memory, rank 0 keeps its own
// and the others are separate.
Handover hand_over(MPI_Comm comm, size_t bytes, Segment* segment);

}  // namespace mykv
