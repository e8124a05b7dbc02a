// The end of MPI: when Python exits, or when the user finalizes MPI.
#pragma once

#include <pybind11/pybind11.h>

namespace mykv {

// From now on all groups leave when MPI is finalized.
void watch_finalize();

void bind_mpi_exit(pybind11::module_& m);

}  // namespace mykv
