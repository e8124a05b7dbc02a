// Messages on their way between two ranks of different hosts: sent and received without blocking, and looked at all
// together, since every look costs a system call.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <set>
#include <vector>

namespace mykv {

class MpiRequests {
 public:
  explicit MpiRequests(MPI_Comm comm) : comm_(comm) {}

  // Both raise *pending, and poll() lowers it when the memory is free again, or filled.
  void send(const void* data, size_t bytes, int to, int tag, size_t* pending);
  void receive(void* data, size_t bytes, int from, int tag, size_t* pending);
  // Looks at the network; whether a message came to its end.
  bool poll();
  bool empty() const { return requests_.empty(); }

  // From here on nothing is received; what is under way already may still come. Counts are not kept any more.
  void cancel();
  // After that: looks once more; whether nothing is on its way but to ranks that are gone.
  bool only_to(const std::set<int>& gone);

 private:
  struct Outstanding {
    size_t* pending;
    int to;  // or kReceived
  };
  MPI_Request* add(size_t* pending, int to);
  void remove(size_t at);

  MPI_Comm comm_;
  std::vector<MPI_Request> requests_;
  std::vector<Outstanding> outstanding_;  // of each request
  std::vector<int> ended_;
};

}  // namespace mykv
