// An MPI communicator that frees itself.
#pragma once

#include <mpi.h>

#include <utility>

namespace mykv {

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
  // same number, so a communicator that may have such a message must keep its number.
  void let_go() { comm_ = MPI_COMM_NULL; }
  MPI_Comm get() const { return comm_; }
  // A copy of `comm` that returns errors. Collective over `comm`; throws Error, which names `what` it is for.
  static Communicator duplicate(MPI_Comm comm, const char* what = "MPI_Comm_dup");

  int rank() const;
  int size() const;

 private:
  MPI_Comm comm_ = MPI_COMM_NULL;
};

}  // namespace mykv
