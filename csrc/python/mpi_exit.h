// The end of MPI, when Python exits or the user says so.
#pragma once

#include <pybind11/pybind11.h>

namespace mykv {

// From here on all groups leave when MPI is finalized.
void watch_finalize();

void bind_mpi_exit(pybind11::module_& m);

// From now on, or no more: exit() of this process with another status than 0 ends it by SIGKILL. Of that Open MPI's
// launcher tells the processes that are to go on without it, and of a status it does not (failed_exits.py); there are
// such exits without anybody's wish, as MXNet 1.9 makes one of a segmentation fault.
void end_failed_exits_by_signal(bool on);

}  // namespace mykv
