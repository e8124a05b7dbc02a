// Messages on their way between two ranks of different hosts: sent and received without blocking, and looked at all
// together, since every look costs a system call.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <vector>

namespace mykv {

class Messages {
 public:
  explicit Messages(MPI_Comm comm) : comm_(comm) {}

  // Both raise *pending, and poll() lowers it when the memory is free again, or filled.
  void send(const void* data, size_t bytes, int to, int tag, size_t* pending);
  void receive(void* data, size_t bytes, int from, int tag, size_t* pending);
  // Looks at the network; whether a message came to its end.
  bool poll();
  bool empty() const { return requests_.empty(); }

 private:
  MPI_Request* add(size_t* pending);

  MPI_Comm comm_;
  std::vector<MPI_Request> requests_;
  std::vector<size_t*> pending_;  // of each request
  std::vector<int> ended_;
};

}  // namespace mykv
