// Communicators of worlds that have ended, for the next world of the same processes.
//
// A world of several hosts cannot free its communicators: each rank leaves when it likes, and MPI would give their
// number to a later communicator, which would receive what is still on its way. But where all ranks make a world of the
// same processes again, they meet. What each rank has sent before has then come ahead of a mark that it sends to each
// other one, and is thrown away.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <vector>

namespace mykv {

struct CommunicatorPair {
  uint64_t number = 0;  // of this pair among those of its processes; the same on all of them
  MPI_Comm control = MPI_COMM_NULL;
  MPI_Comm data = MPI_COMM_NULL;
};

// The processes of a communicator, by their ranks in MPI_COMM_WORLD; empty where one of them has none there.
std::vector<int> processes_of(MPI_Comm comm);

// A pair of these processes that all of them have given back, emptied; else only the number for a new one. Collective
// over `comm`, which has them all.
CommunicatorPair take_communicators(MPI_Comm comm, const std::vector<int>& processes);
// For those who have no message under way in them, in either direction. Any thread.
void give_back_communicators(const std::vector<int>& processes, const CommunicatorPair& pair);

}  // namespace mykv
