// The end of MPI, when Python exits or the user says so.
#pragma once

#include <pybind11/pybind11.h>

namespace mykv {

// From here on all groups leave when MPI is finalized.
void watch_finalize();

void bind_mpi_exit(pybind11::module_& m);

}  // namespace mykv
