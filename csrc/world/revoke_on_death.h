// Revokes communicators on which ranks wait for each other while a world is made, when a process dies.
//
// When a process has died, MPI (ULFM) ends collective calls on communicators that contain it, and on no others. While a
// world is made there are communicators of the ranks of one machine. If the dead process is on another machine and a
// rank of this machine gives up because of it, the other ranks of this machine would wait for that rank forever. So
// each process that notices a death revokes the communicators on which it waits.
#pragma once

#include <mpi.h>

namespace mykv {

class RevokeOnDeath {
 public:
  // From here on the communicator is revoked when a process is lost. Throws Error if a process was lost already.
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

}  // namespace mykv
