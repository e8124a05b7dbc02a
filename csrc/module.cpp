// The Python bindings of the core. The module imports without MXNet and never initializes MPI by itself.
#include <mpi.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "base/error.h"
#include "kernels/kernels.h"
#include "python/bucket_classes.h"
#include "python/errors.h"
#include "python/failed_end.h"
#include "python/gpu.h"
#include "python/gradient_norm.h"
#include "python/group_class.h"
#include "python/groups.h"
#include "python/mpi_exit.h"
#include "python/mxnet_functions.h"
#include "python/options.h"
#include "python/stalls.h"
#include "python/timeline.h"
#include "world/revoke_on_death.h"

namespace py = pybind11;

namespace mykv {
namespace {

// The ABI that a wheel's core needs: it runs with any MPI that has it. Empty: the core needs the MPI of its build.
#ifdef MYKV_MPI_ABI
constexpr const char* kMpiAbi = MYKV_MPI_ABI;
#else
constexpr const char* kMpiAbi = "";
#endif

void init(int comm, const py::dict& given) {
  if (world_group()) throw Error("mykv is initialized already");
  const RuntimeOptions options = options_from(given);
  watch_finalize();
  world_group() = std::make_shared<Group>(MPI_Comm_f2c(comm), options);
}

std::shared_ptr<Group> make_group(int comm, std::vector<int> labels, const py::dict& given) {
  constexpr size_t kMostAddressSpace = size_t{1} << 40;  // there may be dozens of groups
  require_world();
  RuntimeOptions options = options_from(given);
  int size = 0;
  MPI_Comm_size(MPI_Comm_f2c(comm), &size);
  if (labels.size() != static_cast<size_t>(size)) {
    throw py::value_error("labels must have one number for each of the " + std::to_string(size) + " ranks");
  }
  options.world.labels = std::move(labels);
  options.world.most_address_space = kMostAddressSpace;
  return std::make_shared<Group>(MPI_Comm_f2c(comm), options);
}

void shutdown() {
  if (!world_group() || world_group()->forked()) return;
  const std::shared_ptr<Group> last = std::move(world_group());
  world_group().reset();
  py::gil_scoped_release release;
  leave_all("it shut mykv down");
}

void abandon(const std::string& reason) {
  py::gil_scoped_release release;
  leave_all(reason);
}

py::dict build_info() {
  py::dict info;
  info["version"] = MYKV_VERSION;
  info["mpi"] = MYKV_MPI_BUILD;
  info["mpi_abi"] = kMpiAbi;
  info["compiler"] = __VERSION__;
  py::list kernels;
  for (const char* path : kernel_paths_built()) kernels.append(path);
  info["kernels"] = kernels;
  info["kernel"] = kernel_path();
  return info;
}

std::string mpi_library_version() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(text, &length);
  return std::string(text, static_cast<size_t>(length));
}

py::dict transports() {
  py::dict result;
  const std::shared_ptr<Group> group = world_group();
  for (const auto& [name, reason] :
       transport_report(group ? &group->world() : nullptr, group ? &group->gpus() : nullptr))
    result[name.c_str()] = reason;
  return result;
}

}  // namespace
}  // namespace mykv

PYBIND11_MODULE(mykv_core, m) {
  using namespace mykv;
  m.doc() = "The compiled core of mykv: collective operations over shared memory and MPI.";
  bind_errors(m);

  m.def("init", &init, py::arg("comm"), py::arg("options") = py::dict(),
        "Start the runtime over a communicator (its Fortran handle). Collective.");
  m.def("shutdown", &shutdown, "Stop the runtime. The operations that other ranks still have fail.");
  m.def("abandon", &abandon, py::arg("reason"), "Tell the other ranks that this one goes, and stop.");
  m.def(
      "lose",
      [](const std::string& reason, std::vector<int> ranks) { lose_all({reason, ErrorCode::dead, std::move(ranks)}); },
      py::arg("reason"), py::arg("ranks") = std::vector<int>(), py::call_guard<py::gil_scoped_release>(),
      "Processes have died: end all operations of this one, at once, with the reason. `ranks`: theirs, if known.");
  m.def(
      "watch", [](bool on) { Runtime::watched().store(on); }, py::arg("on"),
      "Whether lose() is called soon after a process has died: then errors that come from a death name it.");
  m.def("begin_again", &RevokeOnDeath::begin_again,
        "After lose(): those that are left know of each other, and will init().");
  m.def("is_initialized", [] { return static_cast<bool>(world_group()); });
  m.def("transports", &transports, "Each transport, with the reason why it is not in use ('' where it is).");
  m.def("build_info", &build_info);
  m.def("mpi_library_version", &mpi_library_version, "Version text of the MPI library that is loaded.");

  py::class_<Work>(m, "Work", "A request on numpy buffers under way.")
      .def("wait", &Work::wait, py::arg("timeout") = -1.0,
           "True when done, False when `timeout` seconds are over; raises Error.")
      .def("done", &Work::done);

  bind_buffer(m);  // before the functions whose signatures name it
  bind_group(m);
  m.def("make_group", &make_group, py::arg("comm"), py::arg("labels"), py::arg("options") = py::dict(),
        "A Group over a communicator (its Fortran handle). Collective over it. labels[r]: what messages call rank r.");
  m.def("world", [] { return world_group(); }, "The Group of init(), or None.");
  bind_gpu(m);
  bind_prepared(m);
  bind_mxnet(m);
  bind_gradient_norm(m);
  bind_timeline(m);
  bind_mpi_exit(m);
  bind_failed_end(m);
  m.def("begin_stall_watch", &begin_stall_watch);
  m.def("end_stall_watch", &end_stall_watch, "Make next_stalls() return None.");
  m.def("next_stalls", &next_stalls, py::arg("warn_seconds"), py::arg("abort_seconds"),
        "Wait until operations of this process stall, or go on again: a list of (whether they go on, sentence).");
  m.def("kernel_path", &kernel_path);
  m.def("select_kernel_path", &select_kernel_path, py::arg("name"));
}
