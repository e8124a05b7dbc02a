// Messages under way between ranks of different hosts: sent and received without blocking, and polled all together,
// since every poll costs a system call.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <set>
#include <vector>

#include "base/mpi_check.h"

namespace mykv {

class MpiRequests {
 public:
  explicit MpiRequests(MPI_Comm comm) : comm_(comm) {}

  // Both raise *pending; poll() lowers it when the message was sent, or received.
  void send(const void* data, size_t bytes, int to, int tag, size_t* pending);
  void receive(void* data, size_t bytes, int from, int tag, size_t* pending);
  // Polls the network; whether a message ended.
  bool poll();
  const Traffic& sent() const { return sent_; }
  const Traffic& received() const { return received_; }
  bool empty() const { return requests_.empty(); }

  // Cancels all receives; a message under way may still arrive. Afterwards *pending is not updated any more.
  void cancel();
  // After cancel(): polls once; whether the only messages left are messages to ranks in `gone`.
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
  Traffic sent_;
  Traffic received_;
};

}  // namespace mykv
