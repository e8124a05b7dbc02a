#include <mpi.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "base/error.h"
#include "kernels/kernels.h"
#include "python/arguments.h"
#include "python/bindings.h"
#include "python/group.h"
#include "python/without_gil.h"
#include "world/communicator.h"

namespace py = pybind11;

namespace mykv {

namespace {

void init(int comm, const py::dict& given) {
  if (world_group()) throw Error("mykv is initialized already");
  const RuntimeOptions options = options_from(given);
  watch_finalize();
  try {
    world_group() = std::make_shared<Group>(MPI_Comm_f2c(comm), options);
  } catch (const std::system_error& error) {
    throw Error(std::string("mykv cannot start its thread: ") + error.what());
  }
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
  WithoutGil release;
  leave_all("it shut mykv down");
}

void leave(const Reason& reason) {
  WithoutGil release;
  leave_all(reason.text);
}

}  // namespace

void bind_world(py::module_& m) {
  m.def("init", &init, py::arg("comm"), py::arg("options") = py::dict(),
        "Start the runtime over a communicator (its Fortran handle). Collective.");
  m.def("shutdown", &shutdown, "Stop the runtime. Open operations of other ranks fail.");
  m.def("leave", &leave, py::arg("reason"), "Tell the other ranks that this rank leaves, and stop.");
  m.def(
      "lose",
      [](const Reason& reason, std::vector<int> ranks) { lose_all({reason.text, ErrorCode::dead, std::move(ranks)}); },
      py::arg("reason"), py::arg("ranks") = std::vector<int>(), py::call_guard<WithoutGil>(),
      "Processes have died: end all operations of this one, at once, with the reason. `ranks`: theirs, if known.");
  m.def(
      "watch", [](bool on) { Runtime::watched().store(on); }, py::arg("on"),
      "Whether lose() is called soon after a process has died: then errors that come from a death name it.");
  m.def("begin_again", &RevokeOnDeath::begin_again,
        "After lose(): the survivors know each other and will call init().");
  m.def("is_initialized", [] { return static_cast<bool>(world_group()); });
  m.def(
      "make_group", &make_group, py::arg("comm"), py::arg("labels"), py::arg("options") = py::dict(),
      "A Group over a communicator (its Fortran handle). Collective over it. labels[r]: number of rank r in messages.");
  m.def("world", [] { return world_group(); }, "The Group of init(), or None.");
}

namespace {

// The MPI ABI that a wheel's core needs: any MPI with this ABI works. Empty: the core needs the MPI of its build.
#ifdef MYKV_MPI_ABI
constexpr const char* kMpiAbi = MYKV_MPI_ABI;
#else
constexpr const char* kMpiAbi = "";
#endif

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

void bind_build_facts(py::module_& m) {
  m.def("transports", &transports, "Each transport, with the reason why it is not in use ('' where it is).");
  m.def("build_info", &build_info);
  m.def("mpi_library_version", &mpi_library_version, "Version text of the MPI library that is loaded.");
  m.def("kernel_path", &kernel_path);
  m.def("select_kernel_path", &select_kernel_path, py::arg("name"));
}

}  // namespace mykv
