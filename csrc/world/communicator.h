// An MPI communicator that frees itself.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace mykv {

// When a process dies, revokes the communicators on which ranks wait for each other while they create a world.
//
// When a process has died, MPI (ULFM) ends collective calls on communicators that contain it, and on no others. While a
// world is created there are communicators of the ranks of one machine. If the dead process is on another machine and a
// rank of this machine gives up because of it, the other ranks of this machine would wait for that rank forever. So
// each process that notices a death revokes the communicators on which it waits.

class RevokeOnDeath {
 public:
  // Makes lose() revoke the communicator while this object exists. Throws Error if a process was lost already.
  explicit RevokeOnDeath(MPI_Comm comm);
  ~RevokeOnDeath();
  RevokeOnDeath(const RevokeOnDeath&) = delete;
  RevokeOnDeath& operator=(const RevokeOnDeath&) = delete;

  // A process has died: revokes the communicators of all existing objects. No object can be created until
  // begin_again(). Thread-safe.
  static void lose();
  // All surviving ranks know which ranks have died; new objects may be created.
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
  // A copy of `comm` that returns errors. Collective over `comm`. Throws Error, in which `what` names the call.
  static Communicator duplicate(MPI_Comm comm, const char* what = "MPI_Comm_dup");

  int rank() const;
  int size() const;

 private:
  MPI_Comm comm_ = MPI_COMM_NULL;
};

// Communicators of worlds that have ended, for the next world of the same processes.
//
// A world of several hosts cannot free its communicators: each rank leaves at its own time, and MPI would give their
// number to a later communicator, which would receive messages that are still under way. But when all ranks create a
// world of the same processes again, they can empty the old communicators: each rank sends a mark to every other rank,
// and messages that arrive before the mark are dropped.

struct CommunicatorPair {
  uint64_t number = 0;  // the pair's number among the pairs of the same processes; equal on all of them
  MPI_Comm control = MPI_COMM_NULL;
  MPI_Comm data = MPI_COMM_NULL;
};

// The processes of a communicator, by their ranks in MPI_COMM_WORLD; empty if a process has no rank there.
std::vector<int> processes_of(MPI_Comm comm);

// A pair that all of these processes have given back, emptied of old messages. If there is none, only the number for a
// new pair. Collective over `comm`, the communicator of these processes.
CommunicatorPair take_communicators(MPI_Comm comm, const std::vector<int>& processes);
// Only for a rank that is sending no message in the pair and has received no message in part. Thread-safe.
void give_back_communicators(const std::vector<int>& processes, const CommunicatorPair& pair);

}  // namespace mykv
