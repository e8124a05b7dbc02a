#include <mpi.h>

#include <memory>
#include <string>

#include "kernels/kernels.h"
#include "python/bindings.h"
#include "python/group.h"
#include "python/groups.h"

namespace py = pybind11;

namespace mykv {

namespace {

// The ABI that a wheel's core needs: it runs with any MPI that has it. Empty: the core needs the MPI of its build.
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
