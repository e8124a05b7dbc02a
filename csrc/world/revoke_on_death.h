// Communicators on which the ranks of a machine wait for each other while a world is made; they end with a death.
//
// When a process has died, MPI (ULFM) ends collective calls on all communicators that hold it, and on no others. While
// a world is made there are communicators of the ranks of one machine. Where the dead process is on another machine,
// and one of the ranks has given up because of it, the others would wait for that one for ever: so whoever notices a
// death revokes what the ranks wait on.
#pragma once

#include <mpi.h>

namespace mykv {

class RevokeOnDeath {
 public:
  // From here on the communicator is revoked when a process is lost. Throws Error where one was lost already.
  explicit RevokeOnDeath(MPI_Comm comm);
  ~RevokeOnDeath();
  RevokeOnDeath(const RevokeOnDeath&) = delete;
  RevokeOnDeath& operator=(const RevokeOnDeath&) = delete;

  // A process has died: ends all meetings of this process, and those that begin before begin_again(). Any thread.
  static void lose();
  // All that are left know of those who have died.
  static void begin_again();

 private:
  MPI_Comm comm_;
};

}  // namespace mykv
