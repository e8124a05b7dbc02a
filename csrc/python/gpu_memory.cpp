// Operations on GPU memory, also of other libraries.
#include <pybind11/stl.h>

#include <tuple>

#include "base/error.h"
#include "operations/signature.h"
#include "python/group.h"

namespace py = pybind11;

namespace mykv {

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
    if (operation.road != Road::nccl) throw py::value_error("an alltoall in one operation goes by NCCL alone");
    if (!request.shards || request.shards->size() != size * size) {
      throw py::value_error("an alltoall needs a shard from each rank to each");
    }
  }
  request.operation = operation;
  request.signature =
      signature_of(operation, shape_text(shape), world().label(operation.root), label, request.shards.get());
  return post(std::move(request), {});
}

}  // namespace mykv
