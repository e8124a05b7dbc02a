// An MPI communicator that frees itself.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace mykv {

// Revokes communicators on which ranks wait for each other while a world is created, when a process dies.
//
// When a process has died, MPI (ULFM) ends collective calls on communicators that contain it, and on no others. While a
// world is created there are communicators of the ranks of one machine. If the dead process is on another machine and a
// rank of this machine gives up because of it, the other ranks of this machine would wait for that rank forever. So
// each process that notices a death revokes the communicators on which it waits.

class RevokeOnDeath {
 public:
  // From now on the communicator is revoked when a process is lost. Throws Error if a process was lost already.
  explicit RevokeOnDeath(MPI_Comm comm);
  ~RevokeOnDeath();
  RevokeOnDeath(const RevokeOnDeath&) = delete;
  RevokeOnDeath& operator=(const RevokeOnDeath&) = delete;

  // A process has died: ends all meetings of this process, also meetings that begin before begin_again(). Thread-safe.
  static void lose();
  // All surviving ranks know which ranks have died; new meetings may begin.
  static void begin_again();

 private:
  MPI_Comm comm_;
};

// Owns an MPI communicator and frees it, unless MPI was finalized before or let_go() was called.
class Communicator {
 public:
  Communicator() = default;
  explicit Communicator(MPI_Comm comm) : comm_(comm) {}
  Communicator(Communicator&& other) noexcept : comm_(std::exchange(other.comm_, MPI_COMM_NULL)) {}
  Communicator& operator=(Communicator&& other) noexcept {
    std::swap(comm_, other.comm_);
    return *this;
  }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  ~Communicator();

  // Never frees the communicator. MPI would deliver a message that was never received to the next communicator with the
  // same number, so a communicator that may have such a message must keep its number forever.
  void let_go() { comm_ = MPI_COMM_NULL; }
  MPI_Comm get() const { return comm_; }
  // A copy of `comm` that returns errors. Collective over `comm`; throws Error, which names `what` it is for.
  static Communicator duplicate(MPI_Comm comm, const char* what = "MPI_Comm_dup");

  int rank() const;
  int size() const;

 private:
  MPI_Comm comm_ = MPI_COMM_NULL;
};

// Communicators of worlds that have ended, for the next world of the same processes.
//
// A world of several hosts cannot free its communicators: each rank leaves at its own time, and MPI would give their
// number to a later communicator, which would receive messages that are still under way. But when all ranks make a
// world of the same processes again, they meet: each rank sends a mark to every other rank, and messages that arrive
// before the mark are dropped.

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
