// Messages of any length from other ranks, received without waiting for a sender: MPI transfers a large message only
// after a handshake, which a stopped or dead sender does not answer.
#pragma once

#include <mpi.h>

#include <list>
#include <vector>

namespace mykv {

class Inbox {
 public:
  // Receives messages with this tag. The communicator may be MPI_COMM_NULL if take() is never called.
  Inbox(MPI_Comm comm, int tag) : comm_(comm), tag_(tag) {}
  Inbox(const Inbox&) = delete;
  Inbox& operator=(const Inbox&) = delete;
  ~Inbox();

  // The next message that has arrived completely, and its sender; false if there is none. Messages of one sender keep
  // their order. Throws Error if MPI fails.
  bool take(std::vector<char>* bytes, int* from);
  // Whether no message has arrived in part.
  bool quiet() const { return coming_.empty(); }

 private:
  struct Coming {
    std::vector<char> bytes;
    int from;
    MPI_Request request;
    bool here;
  };
  MPI_Comm comm_;
  int tag_;
  std::list<Coming> coming_;  // in the order in which MPI matched them, which for each sender is the order of sending
};

}  // namespace mykv
