// Views of numpy's memory end on threads of MXNet's engine, even during and after Python's exit. Python ends a thread
// that asks for the GIL then, and with it the process ("terminate called without an active exception"). So these
// threads only note which objects no longer have a view; a thread that has the GIL drops the objects.
#include "gpu/memory.h"

#include <Python.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "gpu/libraries.h"
#include "operations/signature.h"
#include "python/bindings.h"
#include "python/group.h"
#include "python/without_gil.h"

namespace py = pybind11;

namespace mykv {

namespace {

constexpr int kLooks = 1000;
constexpr int kLookUs = 1000;

// DLPack's struct, in the version that MXNet has. Only the owner is used.
struct ManagedTensor {
  struct {
    void* data;
    int32_t device[2];
    int32_t dimensions;
    uint8_t type[4];
    int64_t* shape;
    int64_t* strides;
    uint64_t byte_offset;
  } tensor;
  PyObject* owner;
  void (*deleter)(ManagedTensor*);
};
static_assert(sizeof(ManagedTensor) == 64, "another layout than DLPack's");

struct Returned {
  PyObject* owner;
  Returned* next;
};

// Lock-free, since a fork might find a mutex locked.
std::atomic<Returned*> g_returned{nullptr};
std::atomic<bool> g_asked{false};  // Python is about to call drop
std::atomic<bool> g_ended{false};  // Python exits; memory returned from now on is kept
std::atomic<int> g_asking{0};      // threads that are about to ask Python to call drop

int drop(void*) {
  drop_returned_memory();
  return 0;
}

void give_back(ManagedTensor* view) {
  auto* const mine = new Returned{view->owner, g_returned.load()};
  while (!g_returned.compare_exchange_weak(mine->next, mine)) {
  }
  ++g_asking;
  if (!g_ended && !g_asked.exchange(true) && Py_AddPendingCall(&drop, nullptr) != 0) g_asked = false;
  --g_asking;
}

void keep_returned_memory() {
  g_ended = true;
  for (int looks = 0; g_asking > 0 && looks < kLooks; ++looks) usleep(kLookUs);
}

}  // namespace

void drop_returned_memory() {
  g_asked = false;
  if (g_returned.load(std::memory_order_relaxed) == nullptr) return;
  for (Returned* one = g_returned.exchange(nullptr); one != nullptr;) {
    Py_DECREF(one->owner);
    delete std::exchange(one, one->next);
  }
}

void bind_late_views(py::module_& m) {
  m.def(
      "deleter_of_views", [] { return reinterpret_cast<uintptr_t>(&give_back); },
      "The address of a function that returns the memory of a DLPack view to its owner, an object of Python. Any\n"
      "thread may call it at any time.");
  m.def("keep_returned_memory", &keep_returned_memory, py::call_guard<WithoutGil>(),
        "Python exits: memory that views return from now on is kept.");
}

// Operations on GPU memory, including other libraries' memory.

namespace {

template <class Tuple>
std::vector<Tuple> list_in(const py::dict& memory, const char* name) {
  return memory.contains(name) ? py::cast<std::vector<Tuple>>(memory[name]) : std::vector<Tuple>();
}

// Fills in the request's memory. Devices are in the order of Request::inputs or sources, and outputs or targets.
void take_memory(const py::dict& memory, Request* request) {
  auto devices = std::make_shared<DeviceMemory>();
  using Whole = std::tuple<uintptr_t, int>;
  using Window = std::tuple<size_t, size_t, uintptr_t, int>;
  for (const auto& [address, device] : list_in<Whole>(memory, "inputs")) {
    request->inputs.push_back(reinterpret_cast<const void*>(address));
    devices->inputs.push_back(device);
  }
  for (const auto& [address, device] : list_in<Whole>(memory, "outputs")) {
    request->outputs.push_back(reinterpret_cast<void*>(address));
    devices->outputs.push_back(device);
  }
  for (const auto& [begin, count, address, device] : list_in<Window>(memory, "sources")) {
    request->sources.push_back({begin, count, reinterpret_cast<const void*>(address)});
    devices->inputs.push_back(device);
  }
  for (const auto& [begin, count, address, device] : list_in<Window>(memory, "targets")) {
    request->targets.push_back({begin, count, reinterpret_cast<void*>(address)});
    devices->outputs.push_back(device);
  }
  request->scattered = !request->sources.empty() || !request->targets.empty();
  try {
    for (const auto& [stream, device] : list_in<std::tuple<uintptr_t, int>>(memory, "streams"))
      devices->after.push_back(gpu::Event::record(device, reinterpret_cast<gpu::CudaStream>(stream)));
    if (memory.contains("context")) {
      const auto context = py::cast<uintptr_t>(memory["context"]);
      for (auto& event : mxnet::events_of(reinterpret_cast<const mxnet::RunContext*>(context)))
        devices->after.push_back(std::move(event));
    }
  } catch (const Error& error) {
    request->refusal = error.what();  // no throw: the other ranks wait for this rank
  }
  request->devices = std::move(devices);
}

}  // namespace

std::unique_ptr<Work> Group::submit_on_gpu(const std::string& name, const std::string& kind, const std::string& dtype,
                                           const std::vector<size_t>& shape, const py::dict& memory,
                                           const std::string& op, double scale, int root, int priority,
                                           const std::string& label, const std::string& wire) {
  Operation operation = kind == "broadcast" ? broadcast_operation(root, priority)
                                            : allreduce_operation(*runtime_, op, scale, priority, wire);
  if (kind == "reduce") {
    operation.kind = Kind::reduce;
    operation.root = broadcast_operation(root, priority).root;
  } else if (kind == "alltoall") {
    operation.kind = Kind::alltoall;
  } else if (kind != "allreduce" && kind != "broadcast") {
    throw py::value_error("mykv has no operation '" + kind + "'");
  }
  size_t count = 1;
  for (const size_t size : shape) {
    if (__builtin_mul_overflow(count, size, &count)) throw py::value_error("an array cannot have so many elements");
  }
  operation.set_arrays(dtype_named(dtype), count);
  Request request;
  request.name = name;
  take_memory(memory, &request);
  const auto division = list_in<BucketShards::value_type>(memory, "shards");
  if (!division.empty()) {
    request.shards = shards_of(division, count, world());
    request.scattered = true;
  }
  operation.road = runtime_->gpus().road_of(operation, *request.devices, request.scattered);
  if (operation.kind == Kind::alltoall) {
    const auto size = static_cast<size_t>(world().size());
    if (operation.road != DataPath::nccl) throw py::value_error("an alltoall in one operation needs NCCL");
    if (!request.shards || request.shards->size() != size * size) {
      throw py::value_error("an alltoall needs a shard from each rank to each");
    }
  }
  request.operation = operation;
  request.signature =
      signature_of(operation, shape_text(shape), world().label(operation.root), label, request.shards.get());
  return post(std::move(request), {});
}

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
    WithoutGil release;
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
      .def(py::init<int, size_t>(), py::arg("device"), py::arg("nbytes"), py::call_guard<WithoutGil>())
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
