#include "python/mpi_exit.h"

#include <mpi.h>
#include <unistd.h>

#include <cstdio>

#include "base/error.h"
#include "python/groups.h"
#include "timeline/timeline.h"

namespace py = pybind11;

namespace mykv {

namespace {

pid_t g_process = 0;    // the process that uses MPI
int g_fork_status = 0;  // exit status of a fork of that process

// Runs at the very end of Python, after the atexit handlers of the user and of MXNet. A forked child has MPI's memory,
// but neither its threads nor its connections, so MPI_Finalize would hang there.
void finalize_mpi() {
  if (getpid() != g_process) return;
  int initialized = 0, finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  if (initialized && !finalized) MPI_Finalize();
}

// MPI_Finalize begins by deleting the attributes of MPI_COMM_SELF (MPI 4.0, 11.2.4). The runtimes leave then, however
// the process ends, since no thread may call MPI later. A fork in which the user's own mpi4py finalizes exits here:
// Python has ended by then.
int leave_at_finalize(MPI_Comm, int, void*, void*) {
  if (getpid() != g_process) {
    std::fflush(nullptr);
    _exit(g_fork_status);
  }
  leave_all("its process has ended");
  Timeline::instance().stop();
  return MPI_SUCCESS;
}

}  // namespace

void watch_finalize() {
  static int key = MPI_KEYVAL_INVALID;
  if (key != MPI_KEYVAL_INVALID) return;
  g_process = getpid();
  MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, &leave_at_finalize, &key, nullptr);
  MPI_Comm_set_attr(MPI_COMM_SELF, key, nullptr);
}

void bind_mpi_exit(py::module_& m) {
  m.def(
      "finalize_mpi_at_exit",
      [] {
        static bool registered = false;
        if (!registered && Py_AtExit(&finalize_mpi) != 0) throw Error("Python takes no more functions for its exit");
        registered = true;
        g_process = getpid();
      },
      "Finalize MPI when Python exits, unless somebody else has, in this process and in no fork of it.");
  m.def(
      "set_fork_status", [](int status) { g_fork_status = status; }, py::arg("status"),
      "With what status this forked child exits, if it does so by finalizing MPI.");
}

}  // namespace mykv
