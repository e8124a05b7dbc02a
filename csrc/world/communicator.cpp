#include "world/communicator.h"

#include "base/mpi_check.h"

namespace mykv {

Communicator Communicator::duplicate(MPI_Comm comm, const char* what) {
  MPI_Comm copy;
  check_mpi(MPI_Comm_dup(comm, &copy), what);
  MPI_Comm_set_errhandler(copy, MPI_ERRORS_RETURN);
  return Communicator(copy);
}

Communicator::~Communicator() {
  if (comm_ == MPI_COMM_NULL) return;
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (!finalized) MPI_Comm_free(&comm_);
}

int Communicator::rank() const {
  int rank = 0;
  MPI_Comm_rank(comm_, &rank);
  return rank;
}

int Communicator::size() const {
  int size = 1;
  MPI_Comm_size(comm_, &size);
  return size;
}

}  // namespace mykv
