// Messages of any length from other ranks, received without ever waiting for a sender: MPI sends what is large only
// when the receiver asks for it, and a sender that was stopped, or is dead, does not answer.
#pragma once

#include <mpi.h>

#include <list>
#include <vector>

namespace mykv {

class Inbox {
 public:
  // Messages with this tag. The communicator may be MPI_COMM_NULL as long as nobody takes any.
  Inbox(MPI_Comm comm, int tag) : comm_(comm), tag_(tag) {}
  Inbox(const Inbox&) = delete;
  Inbox& operator=(const Inbox&) = delete;
  ~Inbox();

  // The next message that is here as a whole, and its sender; false when there is none. Those of one sender keep their
  // order. Throws Error.
  bool take(std::vector<char>* bytes, int* from);
  // No message has come in part.
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
  std::list<Coming> coming_;  // in the order in which they were sent
};

}  // namespace mykv
