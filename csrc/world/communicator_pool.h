// Communicators of worlds that have ended, for the next world of the same processes.
//
// A world of several hosts cannot free its communicators: each rank leaves at its own time, and MPI would give their
// number to a later communicator, which would receive messages that are still under way. But when all ranks make a
// world of the same processes again, they meet: each rank sends a mark to every other rank, and messages that arrive
// before the mark are dropped.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <vector>

namespace mykv {

struct CommunicatorPair {
  uint64_t number = 0;  // of this pair among the pairs of its processes; the same on all of them
  MPI_Comm control = MPI_COMM_NULL;
  MPI_Comm data = MPI_COMM_NULL;
};

// The processes of a communicator, by their ranks in MPI_COMM_WORLD; empty if a process has no rank there.
std::vector<int> processes_of(MPI_Comm comm);

// A pair that all of these processes have given back, without old messages; otherwise only the number for a new pair.
// Collective over `comm`, the communicator of these processes.
CommunicatorPair take_communicators(MPI_Comm comm, const std::vector<int>& processes);
// Only for a rank with no message under way in the pair, in either direction. Thread-safe.
void give_back_communicators(const std::vector<int>& processes, const CommunicatorPair& pair);

}  // namespace mykv
