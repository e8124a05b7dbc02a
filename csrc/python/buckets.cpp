#include "python/buckets.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <utility>

#include "base/error.h"
#include "operations/signature.h"
#include "python/bindings.h"
#include "python/group.h"
#include "python/without_gil.h"

namespace py = pybind11;

namespace mykv {

namespace {

void require_running(const Buffer& buffer) {
  if (buffer.runtime()->left()) throw Error("the buffer is of a runtime that was shut down");
}

// Whether [begin, begin + count) is in [0, size), even for numbers whose sum overflows.
bool lies_in(size_t size, size_t begin, size_t count) { return begin <= size && count <= size - begin; }

Operation bucket_operation(const Runtime& runtime, const std::string& op, double scale, int priority,
                           const std::string& wire, const std::string& dtype, size_t count) {
  Operation operation = allreduce_operation(runtime, op, scale, priority, wire);
  operation.set_arrays(dtype_named(dtype), count);
  return operation;
}

// A request that reduces the elements [begin, begin + count) of a GPU's memory in place.
Request request_on_gpu(const std::string& name, const Runtime& runtime, const std::shared_ptr<gpu::Memory>& memory,
                       size_t begin, const std::string& layout, Operation operation, const BucketShards& division) {
  const size_t width = item_size(operation.dtype);
  if (!lies_in(memory->bytes() / width, begin, operation.count))
    throw py::value_error("the bucket is not in the memory");
  char* data = static_cast<char*>(memory->address()) + begin * width;
  Request request;
  request.name = name;
  auto devices = std::make_shared<DeviceMemory>();
  devices->inputs = devices->outputs = {memory->device()};
  if (division.empty()) {
    request.inputs = {data};
    request.outputs = {data};
  } else {
    operation.kind = Kind::reduce;
    request.scattered = true;
    request.shards = shards_of(division, operation.count, runtime.world());
    request.sources = {{0, operation.count, data}};
    for (const Shard& shard : *request.shards) {
      if (shard.root == runtime.world().rank())
        request.targets.push_back({shard.begin, shard.count, data + shard.begin * width});
    }
  }
  operation.road = runtime.gpus().road_of(operation, *devices, request.scattered);
  request.operation = operation;
  request.devices = std::move(devices);
  request.signature = signature_of(operation, shape_text({operation.count}) + " in place " + layout,
                                   runtime.world().label(operation.root), "", request.shards.get());
  request.owner = memory;
  return request;
}

// The elements [begin, begin + count) of a buffer, as a request in place.
Request request_in_place(const std::string& name, const std::shared_ptr<Buffer>& buffer, size_t begin,
                         const std::string& layout, Operation operation, const BucketShards& division) {
  require_running(*buffer);
  operation.in_place = true;
  const size_t width = item_size(operation.dtype);
  if (!lies_in(buffer->bytes() / width, begin, operation.count))
    throw py::value_error("the bucket is not in the buffer");
  Request request;
  request.name = name;
  request.operation = operation;
  if (!division.empty()) {
    request.shards = shards_of(division, operation.count, buffer->runtime()->world());
    request.operation.kind = Kind::reduce;
  }
  request.signature = signature_of(request.operation, shape_text({operation.count}) + " in place " + layout,
                                   buffer->runtime()->world().label(operation.root), "", request.shards.get());
  request.in_place = buffer->offset() + begin * width;
  request.owner = buffer;
  return request;
}

}  // namespace

std::unique_ptr<Work> Group::submit_bucket(const std::string& name, const std::shared_ptr<Buffer>& buffer, size_t begin,
                                           size_t count, const std::string& dtype, const std::string& layout,
                                           const std::string& op, double scale, int priority, const std::string& wire,
                                           const BucketShards& shards) {
  if (!runs(*buffer)) throw Error("the buffer is of another runtime");
  const Operation operation = bucket_operation(*runtime_, op, scale, priority, wire, dtype, count);
  return post(request_in_place(name, buffer, begin, layout, operation, shards), {});
}

PreparedBucket::PreparedBucket(const std::string& name, std::shared_ptr<Buffer> buffer, size_t begin, size_t count,
                               const std::string& dtype, const std::string& layout, const Handles& arrays,
                               const std::string& op, double scale, int priority, const std::string& wire,
                               const BucketShards& shards)
    : runtime_(buffer->runtime()) {
  const Operation operation = bucket_operation(*runtime_, op, scale, priority, wire, dtype, count);
  prepared_ = bridge().prepare(request_in_place(name, buffer, begin, layout, operation, shards), handles(arrays));
}

PreparedBucket::PreparedBucket(const std::string& name, const std::shared_ptr<Group>& group,
                               const std::shared_ptr<gpu::Memory>& memory, size_t begin, size_t count,
                               const std::string& dtype, const std::string& layout, const Handles& arrays,
                               const std::string& op, double scale, int priority, const std::string& wire,
                               const BucketShards& shards)
    : runtime_(group->runtime()) {
  const Operation operation = bucket_operation(*runtime_, op, scale, priority, wire, dtype, count);
  prepared_ =
      bridge().prepare(request_on_gpu(name, *runtime_, memory, begin, layout, operation, shards), handles(arrays));
}

void PreparedBucket::push(const std::string& label, const std::string& turn_of) const {
  if (runtime_->left()) throw Error("the bucket is of a runtime that was shut down");
  const mxnet::Bridge& target = bridge();
  WithoutGil release;
  target.push(runtime_, prepared_, label, turn_of);
}

Fence::Fence(const Handles& arrays, const Handles& gradients, uint64_t key, std::string names)
    : arrays_(bridge().api(), handles(arrays)),
      gradients_(bridge().api(), handles(gradients)),
      key_(key),
      names_(std::move(names)) {}

void Fence::begin() {
  const mxnet::Bridge& target = bridge();
  watch_ = std::make_shared<mxnet::UpdateWatch>(key_, names_);
  WithoutGil release;
  target.push_look(gradients_, watch_);
}

void Fence::push(bool ends_step, bool broken) {
  const mxnet::Bridge& target = bridge();
  const auto watch = std::exchange(watch_, nullptr);
  WithoutGil release;
  target.push_fence(arrays_, ends_step, broken ? nullptr : watch);
  if (watch) target.push_verdict(arrays_.arrays().front(), watch);
}

void bind_buffer(py::module_& m) {
  py::class_<Buffer, std::shared_ptr<Buffer>>(m, "Buffer", py::buffer_protocol(),
                                              "Memory in the host's shared segment, zeroed; keeps the core alive.")
      .def_buffer([](const Buffer& b) {
        return py::buffer_info(b.data(), 1, py::format_descriptor<uint8_t>::format(),
                               static_cast<py::ssize_t>(b.bytes()));
      })
      .def("commit", &Buffer::commit, py::arg("nbytes"), py::call_guard<WithoutGil>(),
           "Allocate memory for the first `nbytes` bytes; raises Error when memory is out.")
      .def_property_readonly(
          "attached", [](const Buffer& b) { return !b.runtime()->left(); }, "Whether its group still runs.")
      .def_property_readonly("nbytes", &Buffer::bytes);
}

void bind_fence(py::module_& m) {
  py::class_<Fence>(m, "Fence",
                    "A no-op of MXNet's engine: reading one of its arrays waits for all operations\n"
                    "that were pushed on any of its arrays.")
      .def(py::init<const Handles&, const Handles&, uint64_t, std::string>(), py::arg("arrays"),
           py::arg("gradients") = Handles(), py::arg("key") = 0, py::arg("names") = "",
           "names: the prefix of the names of the operations that sum the gradients.")
      .def("begin", &Fence::begin,
           "Call this before updates from the gradients: if they fail on this rank and the gradients carry no error,\n"
           "take_failed_updates() has the key.")
      .def("push", &Fence::push, py::arg("ends_step") = false, py::arg("broken") = false,
           "Put it after the operations that are pushed so far. With ends_step these are updates of a step; with\n"
           "broken some of the updates were not pushed.");
}

void bind_prepared(py::module_& m) {
  py::class_<PreparedBucket>(
      m, "PreparedBucket", "The same as an operation of MXNet's engine that writes `arrays`, which are in the bucket.")
      .def(py::init<const std::string&, std::shared_ptr<Buffer>, size_t, size_t, const std::string&, const std::string&,
                    const std::vector<uintptr_t>&, const std::string&, double, int, const std::string&,
                    const BucketShards&>(),
           py::arg("name"), py::arg("buffer"), py::arg("begin"), py::arg("count"), py::arg("dtype"), py::arg("layout"),
           py::arg("arrays"), py::arg("op") = "sum", py::arg("scale") = 1.0, py::arg("priority") = 0,
           py::arg("wire") = "", py::arg("shards") = BucketShards())
      .def(py::init<const std::string&, const std::shared_ptr<Group>&, const std::shared_ptr<gpu::Memory>&, size_t,
                    size_t, const std::string&, const std::string&, const std::vector<uintptr_t>&, const std::string&,
                    double, int, const std::string&, const BucketShards&>(),
           py::arg("name"), py::arg("group"), py::arg("memory"), py::arg("begin"), py::arg("count"), py::arg("dtype"),
           py::arg("layout"), py::arg("arrays"), py::arg("op") = "sum", py::arg("scale") = 1.0, py::arg("priority") = 0,
           py::arg("wire") = "", py::arg("shards") = BucketShards())
      .def("push", &PreparedBucket::push, py::arg("label") = "", py::arg("turn_of") = "",
           "Start it again. The label must be the same on all ranks; if it differs, the error shows it. With\n"
           "turn_of it takes the last turn under that name.");
}

}  // namespace mykv
