// An MPI communicator that frees itself.
#pragma once

#include <mpi.h>

#include <utility>

namespace mykv {

// An MPI communicator of our own, freed with its owner unless MPI was finalized before or it was let go.
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

  // Never frees it. A message that nobody received would be delivered to the next communicator of the same number, so
  // what may carry one when a rank leaves must keep its number.
  void let_go() { comm_ = MPI_COMM_NULL; }
  MPI_Comm get() const { return comm_; }
  int rank() const;
  int size() const;

 private:
  MPI_Comm comm_ = MPI_COMM_NULL;
};

}  // namespace mykv
