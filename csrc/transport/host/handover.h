// Hands the host's shared segment from its maker to the other ranks of the host, over a Unix socket in the abstract
// namespace, to processes of the same user that know this job's token.
#pragma once

#include <mpi.h>

#include "memory/segment.h"

namespace mykv {

// Collective over `comm`. Rank 0 brings *segment, the others get it mapped there. Returns whether this rank has it:
// false where the ranks of `comm` turn out not to share a kernel, a network namespace or a user.
bool hand_over(MPI_Comm comm, Segment* segment);

}  // namespace mykv
