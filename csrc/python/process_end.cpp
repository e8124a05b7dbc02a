#include <dlfcn.h>
#include <mpi.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/error.h"
#include "python/bindings.h"
#include "python/group.h"
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
      "Finalize MPI when Python exits, unless MPI is finalized already. Not in forks of this process.");
  m.def(
      "set_fork_status", [](int status) { g_fork_status = status; }, py::arg("status"),
      "The exit status of this forked child, if it exits by finalizing MPI.");
}

namespace {

constexpr int kMostHooks = 2;

std::atomic<pid_t> g_by_signal{0};  // the process whose failed exits end by a signal
int g_world_rank = 0;

void end_by_signal(int status, void*) {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (status == 0 || finalized || g_by_signal.load() != getpid()) return;
  // This may run in a signal handler: it must not take a lock.
  char text[256];
  const int length = std::snprintf(
      text, sizeof text,
      "mykv: rank %d of MPI_COMM_WORLD exits with status %d; it ends by SIGKILL instead, of which the other "
      "workers are told.\n",
      g_world_rank, status);
  if (write(STDERR_FILENO, text, static_cast<size_t>(length)) < 0) {
    // stderr is closed.
  }
  kill(getpid(), SIGKILL);
}

// Called again when MXNet's engine exists: the engine's exit handler waits for operations, and would otherwise run
// before this handler.
void end_failed_exits_by_signal(bool on) {
  static int hooks = 0;
  if (on && hooks < kMostHooks) {
    MPI_Comm_rank(MPI_COMM_WORLD, &g_world_rank);
    hooks += on_exit(&end_by_signal, nullptr) == 0;
  }
  g_by_signal.store(on ? getpid() : 0);
}

// MXNet 1.9 turns a segmentation fault into exit(-1): its signal handler runs all exit handlers. The engine's exit
// handler deadlocks if the main thread was waiting for the engine.
bool drop_crash_handler_of(const std::string& library) {
  struct sigaction now{};
  if (sigaction(SIGSEGV, nullptr, &now) != 0 || (now.sa_flags & SA_SIGINFO) != 0) return false;
  Dl_info info{};
  if (now.sa_handler == SIG_DFL || now.sa_handler == SIG_IGN ||
      dladdr(reinterpret_cast<void*>(now.sa_handler), &info) == 0 || info.dli_fname == nullptr ||
      std::strstr(info.dli_fname, library.c_str()) == nullptr)
    return false;
  return std::signal(SIGSEGV, SIG_DFL) != SIG_ERR;
}

}  // namespace

void bind_failed_end(py::module_& m) {
  m.def("end_failed_exits_by_signal", &end_failed_exits_by_signal, py::arg("on"),
        "Whether exit() of this process with a nonzero status, before MPI is finalized, ends it by SIGKILL. Of "
        "a signal Open MPI's launcher tells the surviving processes, of an exit status it does not.");
  m.def("drop_crash_handler_of", &drop_crash_handler_of, py::arg("library"),
        "Let a segmentation fault end this process at once, if a library whose path holds this text handles it now.");
}

}  // namespace mykv
