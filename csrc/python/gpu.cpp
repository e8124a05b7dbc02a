#include <pybind11/stl.h>

#include "gpu/libraries.h"
#include "gpu/memory.h"
#include "python/bindings.h"
#include "python/group.h"
#include "python/groups.h"

namespace py = pybind11;

namespace mykv {

namespace {

// Facts about a library: its path and version, or why there is none.
template <class Api>
py::dict facts(const Api* api, const std::string& problem) {
  py::dict result;
  result["path"] = api == nullptr ? "" : api->path();
  result["version"] = api == nullptr ? 0 : api->version();
  result["problem"] = problem;
  return result;
}

py::dict find_gpus(const std::vector<std::string>& cuda, const std::vector<std::string>& nccl) {
  const gpu::Libraries* found = nullptr;
  {
    py::gil_scoped_release release;
    found = &gpu::Libraries::load(cuda, nccl);
  }
  py::dict result;
  result["cuda"] = facts(found->cuda(), found->cuda_problem());
  result["nccl"] = facts(found->nccl(), found->nccl_problem());
  result["driver"] = found->cuda() == nullptr ? 0 : found->cuda()->driver_version();
  result["devices"] = found->cuda() == nullptr ? 0 : found->cuda()->device_count();
  return result;
}

}  // namespace

void bind_gpu(py::module_& m) {
  py::class_<gpu::Memory, std::shared_ptr<gpu::Memory>>(m, "GpuMemory", "Memory on one GPU, zeroed.")
      .def(py::init<int, size_t>(), py::arg("device"), py::arg("nbytes"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("device", &gpu::Memory::device)
      .def_property_readonly("nbytes", &gpu::Memory::bytes)
      .def_property_readonly("address",
                             [](const gpu::Memory& one) { return reinterpret_cast<uintptr_t>(one.address()); });
  m.def("find_gpus", &find_gpus, py::arg("cuda"), py::arg("nccl"),
        "Load the CUDA runtime and NCCL, each from the first usable file of a list; the first call counts.");
  m.def(
      "gpus", [] { return require_world()->gpus().gpus; }, "For each rank the bus addresses of the GPUs that it sees.");
}

}  // namespace mykv
