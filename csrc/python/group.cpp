#include "python/group.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>

#include "base/error.h"
#include "base/keep_forever.h"
#include "compress/compressor.h"
#include "operations/signature.h"
#include "runtime/stall_watch.h"
#include "world/revoke_on_death.h"

namespace py = pybind11;

namespace mykv {

namespace {

std::unique_ptr<mxnet::Bridge>& g_bridge = *new std::unique_ptr<mxnet::Bridge>;

// Every runtime that may still run.
struct Runtimes {
  std::mutex mutex;
  std::vector<std::weak_ptr<Runtime>> all;
};
Runtimes& g_runtimes = *new Runtimes;

DType dtype_named(const std::string& name) {
  DType dtype;
  if (!dtype_from_name(name, &dtype)) throw py::value_error("mykv does not know the dtype '" + name + "'");
  return dtype;
}

// `wire`: the dtype in which values travel between hosts, or a compressor ('topk k=0.01 ...'), or nothing.
Operation allreduce_operation(const Runtime& runtime, const std::string& op, double scale, int priority,
                              const std::string& wire) {
  Operation operation;
  operation.kind = Kind::allreduce;
  if (!reduce_op_from_name(op, &operation.reduce_op)) throw py::value_error("mykv has no operation '" + op + "'");
  operation.scale = scale;
  operation.priority = priority;
  DType dtype;
  if (wire.empty()) return operation;
  if (dtype_from_name(wire, &dtype)) {
    operation.wire = dtype;
    if (dtype != DType::float16 && dtype != DType::bfloat16) {
      throw py::value_error("values travel as float16 or bfloat16, not as " + wire);
    }
    return operation;
  }
  if (operation.reduce_op != ReduceOp::sum) throw py::value_error("only sums can be compressed, not a " + op);
  operation.compressor = &compress::compressor_of(wire);
  operation.compress_from = runtime.options().compress_bytes;
  return operation;
}

DType dtype_of(const py::array& array) { return dtype_named(py::cast<std::string>(py::str(array.dtype()))); }

void require_contiguous(const py::array& array, bool writeable) {
  if (!(array.flags() & py::array::c_style)) throw py::value_error("mykv takes C-contiguous arrays only");
  if (writeable && !array.writeable()) throw py::value_error("an output array is read-only");
}

std::vector<mxnet::Handle> handles(const Handles& numbers) {
  std::vector<mxnet::Handle> result;
  result.reserve(numbers.size());
  for (uintptr_t number : numbers) result.push_back(reinterpret_cast<mxnet::Handle>(number));
  return result;
}

mxnet::Handle handle(uintptr_t number) { return reinterpret_cast<mxnet::Handle>(number); }

void require_running(const Buffer& buffer) {
  if (buffer.runtime()->left()) throw Error("the buffer is of a runtime that was shut down");
}

}  // namespace

const mxnet::Bridge& bridge() {
  if (!g_bridge) throw Error("mykv is not attached to MXNet");
  return *g_bridge;
}

void attach_bridge(std::unique_ptr<mxnet::Bridge> made) {
  if (g_bridge) keep_for_good(std::move(g_bridge));  // another thread may be in a push, without the GIL
  g_bridge = std::move(made);
}

std::shared_ptr<Group>& world_group() {
  static std::shared_ptr<Group>& group = *new std::shared_ptr<Group>;
  return group;
}

std::shared_ptr<Group> require_world() {
  if (!world_group()) throw Error("mykv is not initialized: call kvstore_plugin.init() first");
  return world_group();
}

void leave_all(const std::string& reason) {
  std::vector<std::weak_ptr<Runtime>> leaving;
  {
    std::lock_guard<std::mutex> lock(g_runtimes.mutex);
    leaving = g_runtimes.all;
  }
  for (const std::weak_ptr<Runtime>& one : leaving) {
    if (const std::shared_ptr<Runtime> runtime = one.lock()) runtime->leave(reason);
  }
}

void lose_all(const std::string& reason) {
  RevokeOnDeath::lose();
  std::lock_guard<std::mutex> lock(g_runtimes.mutex);
  for (const std::weak_ptr<Runtime>& one : g_runtimes.all) {
    if (const std::shared_ptr<Runtime> runtime = one.lock()) runtime->lose(reason);
  }
}

namespace {

struct Watching {
  std::mutex mutex;
  std::condition_variable ended;
  bool on = false;
  std::map<std::weak_ptr<Runtime>, StallWatch, std::owner_less<>> of;  // of the watching thread alone
};
Watching& g_watching = *new Watching;

// Often enough for the shorter limit, and for a process that was stopped itself to be noticed.
std::chrono::duration<double> look_every(const StallLimits& limits) {
  double seconds = 1;
  for (double limit : {limits.warn_seconds, limits.abort_seconds}) {
    if (limit > 0) seconds = std::min(seconds, limit / 8);
  }
  return std::chrono::duration<double>(std::max(seconds, 0.01));
}

std::vector<std::pair<bool, std::string>> look_at_all(const StallLimits& limits) {
  std::vector<std::weak_ptr<Runtime>> all;
  {
    std::lock_guard<std::mutex> lock(g_runtimes.mutex);
    all = g_runtimes.all;
  }
  std::vector<std::pair<bool, std::string>> reports;
  for (const std::weak_ptr<Runtime>& one : all) {
    const std::shared_ptr<Runtime> runtime = one.lock();
    if (!runtime) continue;
    if (std::string note = runtime->take_gpu_note(); !note.empty()) reports.emplace_back(false, std::move(note));
    for (StallReport& report : g_watching.of[one].look(*runtime, limits)) {
      reports.emplace_back(report.over, std::move(report.text));
    }
  }
  for (auto it = g_watching.of.begin(); it != g_watching.of.end();) {
    it = it->first.expired() ? g_watching.of.erase(it) : std::next(it);
  }
  return reports;
}

}  // namespace

std::optional<std::vector<std::pair<bool, std::string>>> next_stalls(double warn_seconds, double abort_seconds) {
  const StallLimits limits{warn_seconds, abort_seconds};
  const auto interval = look_every(limits);
  py::gil_scoped_release release;
  std::unique_lock<std::mutex> lock(g_watching.mutex);
  while (g_watching.on) {
    const auto before = std::chrono::steady_clock::now();
    if (g_watching.ended.wait_for(lock, interval, [] { return !g_watching.on; })) break;
    // This process was stopped, maybe all were: give them time for a step.
    if (std::chrono::steady_clock::now() - before > 2 * interval + std::chrono::milliseconds(500)) continue;
    lock.unlock();
    std::vector<std::pair<bool, std::string>> reports = look_at_all(limits);
    if (!reports.empty()) return reports;
    lock.lock();
  }
  return std::nullopt;
}

void begin_stall_watch() {
  std::lock_guard<std::mutex> lock(g_watching.mutex);
  g_watching.on = true;
}

void end_stall_watch() {
  std::lock_guard<std::mutex> lock(g_watching.mutex);
  g_watching.on = false;
  g_watching.ended.notify_all();
}

Group::Group(MPI_Comm comm, const RuntimeOptions& options) {
  py::gil_scoped_release release;
  runtime_ = std::make_shared<Runtime>(comm, options);
  std::lock_guard<std::mutex> lock(g_runtimes.mutex);
  auto& all = g_runtimes.all;
  all.erase(std::remove_if(all.begin(), all.end(), [](const auto& one) { return one.expired(); }), all.end());
  all.push_back(runtime_);
  for (const auto& one : runtime_->own_runtimes()) all.push_back(one);
}

Group::~Group() {
  py::gil_scoped_release release;
  runtime_->leave("it shut mykv down");
}

std::vector<uint64_t> Group::agreement_traffic() {
  const Agreement& agreement = runtime_->agreement();
  return {agreement.sent().messages, agreement.sent().bytes, agreement.received().messages, agreement.received().bytes};
}

void Group::abandon(const std::string& reason) {
  const std::shared_ptr<Runtime> leaving = runtime_;
  py::gil_scoped_release release;
  leaving->leave(reason);
}

std::vector<Group::WaitingTuple> Group::waiting(const std::string& name, double least_seconds) {
  const std::shared_ptr<Runtime> asked = runtime_;
  py::gil_scoped_release release;
  std::vector<WaitingTuple> result;
  for (const Waiting& one : asked->waiting(least_seconds, name)) {
    std::vector<int> silent = one.unresponsive;
    silent.insert(silent.end(), one.unknown.begin(), one.unknown.end());
    result.emplace_back(one.name, one.seconds, asked->world().labels(one.missing), asked->world().labels(silent));
  }
  return result;
}

std::vector<std::vector<int>> Group::waiting_for_this(const std::vector<std::string>& names,
                                                      const std::string& turn_of) {
  const std::shared_ptr<Runtime> asked = runtime_;
  py::gil_scoped_release release;
  std::vector<std::vector<int>> result;
  for (const std::vector<int>& ranks : asked->waiting_for_this(names, turn_of))
    result.push_back(asked->world().labels(ranks));
  return result;
}

void Group::give_up(const std::string& name, const std::string& reason) {
  const std::shared_ptr<Runtime> asked = runtime_;
  py::gil_scoped_release release;
  asked->give_up({{name, reason}});
}

void Group::signal_under_lock(int number) {
  const std::shared_ptr<Runtime> kept = runtime_;
  py::gil_scoped_release release;
  kept->signal_under_lock(number);
}

Operation Group::broadcast_operation(int root, int priority) const {
  if (root < 0 || root >= world().size()) {
    throw py::value_error("root rank " + std::to_string(root) + " is not among the " + std::to_string(world().size()) +
                          " ranks");
  }
  Operation operation;
  operation.kind = Kind::broadcast;
  operation.root = root;
  operation.priority = priority;
  return operation;
}

std::unique_ptr<Work> Group::post(Request request, std::vector<py::array> kept) {
  request.turn = runtime_->take_turn(request.name);
  request.ticket = runtime_->take_ticket();
  auto work = std::make_unique<Work>(std::move(kept));
  request.done = [state = work->state()](const std::string* error) { state->finish(error); };
  const std::shared_ptr<Runtime> target = runtime_;
  py::gil_scoped_release release;
  target->post(std::move(request));
  return work;
}

std::unique_ptr<Work> Group::submit(const std::string& name, Operation operation, const std::vector<py::array>& inputs,
                                    const std::vector<py::array>& outputs, const std::string& label) {
  const std::vector<py::array>& some = inputs.empty() ? outputs : inputs;
  if (some.empty()) throw py::value_error("no array was given");
  Request request;
  request.name = name;
  operation.set_arrays(dtype_of(some[0]), static_cast<size_t>(some[0].size()));
  const auto shape = py::cast<std::string>(py::str(some[0].attr("shape")));
  std::vector<py::array> kept;
  for (const std::vector<py::array>* arrays : {&inputs, &outputs}) {
    for (const py::array& array : *arrays) {
      require_contiguous(array, arrays == &outputs);
      if (dtype_of(array) != operation.dtype || py::cast<std::string>(py::str(array.attr("shape"))) != shape) {
        throw py::value_error("the arrays of one call differ in shape or dtype");
      }
      kept.push_back(array);
    }
  }
  for (const py::array& array : inputs) {
    // One array is copied byte by byte if need be; several are summed where they lie.
    if (inputs.size() > 1 && !(array.flags() & py::detail::npy_api::NPY_ARRAY_ALIGNED_)) {
      throw py::value_error("one of several input arrays is not aligned to its items");
    }
    request.inputs.push_back(array.data());
  }
  for (const py::array& array : outputs) request.outputs.push_back(const_cast<void*>(array.data()));
  request.operation = operation;
  request.signature = signature_of(operation, shape, world().label(operation.root), label);
  return post(std::move(request), std::move(kept));
}

std::unique_ptr<Work> Group::submit_allreduce(const std::string& name, const std::vector<py::array>& inputs,
                                              const std::vector<py::array>& outputs, const std::string& op,
                                              double scale, int priority, const std::string& label,
                                              const std::string& wire) {
  if (inputs.empty()) throw py::value_error("an allreduce needs an input array");
  return submit(name, allreduce_operation(*runtime_, op, scale, priority, wire), inputs, outputs, label);
}

std::unique_ptr<Work> Group::submit_broadcast(const std::string& name, const std::optional<py::array>& input,
                                              const std::vector<py::array>& outputs, int root, int priority,
                                              const std::string& label) {
  std::vector<py::array> inputs;
  if (input) inputs.push_back(*input);
  if (!input && root == world().rank()) throw py::value_error("the root of a broadcast needs an input array");
  return submit(name, broadcast_operation(root, priority), inputs, outputs, label);
}

namespace {

std::shared_ptr<const std::vector<Shard>> shards_of(const BucketShards& division, size_t elements, const World& world) {
  auto shards = std::make_shared<std::vector<Shard>>();
  size_t end = 0;
  for (const auto& [at, count, root] : division) {
    if (at != end || root < 0 || root >= world.size())
      throw py::value_error("shards must be all elements of the operation in their order, and their owners ranks");
    shards->push_back({at, count, root});
    end += count;
  }
  if (end != elements) throw py::value_error("shards must be all elements of the operation");
  return shards;
}

template <class Tuple>
std::vector<Tuple> list_in(const py::dict& memory, const char* name) {
  return memory.contains(name) ? py::cast<std::vector<Tuple>>(memory[name]) : std::vector<Tuple>();
}

// Fills in the memory; the devices are in the order of Request::inputs or sources, and outputs or targets.
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
    request->refusal = error.what();  // the other ranks wait for this one
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
  for (const size_t size : shape) count *= size;
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

std::shared_ptr<Buffer> Group::reserve(size_t bytes) { return runtime_->reserve(bytes); }

std::shared_ptr<Buffer> Group::allocate(size_t bytes) {
  const std::shared_ptr<Buffer> buffer = runtime_->reserve(bytes);
  py::gil_scoped_release release;
  buffer->commit(bytes);
  return buffer;
}

namespace {

// The elements [begin, begin + count) of a GPU's memory, reduced where they lie.
Request request_on_gpu(const std::string& name, const Runtime& runtime, const std::shared_ptr<gpu::Memory>& memory,
                       size_t begin, const std::string& layout, Operation operation, const BucketShards& division) {
  const size_t width = item_size(operation.dtype);
  if (begin + operation.count > memory->bytes() / width) throw py::value_error("the bucket does not lie in the memory");
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
  if (begin + operation.count > buffer->bytes() / width) throw py::value_error("the bucket does not lie in the buffer");
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
  Operation operation = allreduce_operation(*runtime_, op, scale, priority, wire);
  operation.set_arrays(dtype_named(dtype), count);
  return post(request_in_place(name, buffer, begin, layout, operation, shards), {});
}

PreparedBucket::PreparedBucket(const std::string& name, std::shared_ptr<Buffer> buffer, size_t begin, size_t count,
                               const std::string& dtype, const std::string& layout, const Handles& arrays,
                               const std::string& op, double scale, int priority, const std::string& wire,
                               const BucketShards& shards)
    : runtime_(buffer->runtime()) {
  Operation operation = allreduce_operation(*runtime_, op, scale, priority, wire);
  operation.set_arrays(dtype_named(dtype), count);
  prepared_ = bridge().prepare(request_in_place(name, buffer, begin, layout, operation, shards), handles(arrays));
}

PreparedBucket::PreparedBucket(const std::string& name, const std::shared_ptr<Group>& group,
                               const std::shared_ptr<gpu::Memory>& memory, size_t begin, size_t count,
                               const std::string& dtype, const std::string& layout, const Handles& arrays,
                               const std::string& op, double scale, int priority, const std::string& wire,
                               const BucketShards& shards)
    : runtime_(group->runtime()) {
  Operation operation = allreduce_operation(*runtime_, op, scale, priority, wire);
  operation.set_arrays(dtype_named(dtype), count);
  prepared_ =
      bridge().prepare(request_on_gpu(name, *runtime_, memory, begin, layout, operation, shards), handles(arrays));
}

void PreparedBucket::push(const std::string& label, const std::string& turn_of) const {
  if (runtime_->left()) throw Error("the bucket is of a runtime that was shut down");
  const mxnet::Bridge& target = bridge();
  py::gil_scoped_release release;
  target.push(runtime_, prepared_, label, turn_of);
}

Fence::Fence(const Handles& arrays) : arrays_(bridge().api(), handles(arrays)) {}

void Fence::push() const {
  const mxnet::Bridge& target = bridge();
  py::gil_scoped_release release;
  target.push_fence(arrays_);
}

void Group::push_allreduce(const std::string& name, const Handles& inputs, const Handles& outputs,
                           const std::string& op, double scale, int priority, const std::string& label,
                           const std::string& wire) {
  const mxnet::Common common{bridge(), runtime_, name, allreduce_operation(*runtime_, op, scale, priority, wire),
                             label};
  py::gil_scoped_release release;
  mxnet::push_allreduce(common, handles(inputs), handles(outputs));
}

void Group::push_broadcast(const std::string& name, uintptr_t input, const Handles& outputs, int root, int priority,
                           const std::string& label) {
  const mxnet::Common common{bridge(), runtime_, name, broadcast_operation(root, priority), label};
  py::gil_scoped_release release;
  mxnet::push_broadcast(common, handle(input), handles(outputs));
}

void Group::push_group(const std::string& name, const Handles& inputs, const Handles& outputs, const std::string& op,
                       double scale, int priority, const std::string& label, const std::string& wire) {
  const mxnet::Common common{bridge(), runtime_, name, allreduce_operation(*runtime_, op, scale, priority, wire),
                             label};
  py::gil_scoped_release release;
  mxnet::push_group(common, handles(inputs), handles(outputs));
}

void Group::push_allgather(const std::string& name, uintptr_t input, uintptr_t output, const std::vector<size_t>& rows,
                           int priority, const std::string& label) {
  const mxnet::Common common{bridge(), runtime_, name, broadcast_operation(0, priority), label};
  py::gil_scoped_release release;
  mxnet::push_allgather(common, handle(input), handle(output), rows);
}

void Group::push_alltoall(const std::string& name, uintptr_t input, uintptr_t output,
                          const std::vector<std::vector<size_t>>& rows, int priority, const std::string& label) {
  const mxnet::Common common{bridge(), runtime_, name, broadcast_operation(0, priority), label};
  py::gil_scoped_release release;
  mxnet::push_alltoall(common, handle(input), handle(output), rows);
}

void Group::push_reducescatter(const std::string& name, uintptr_t input, uintptr_t output, const std::string& op,
                               double scale, int priority, const std::string& label, const std::string& wire) {
  const mxnet::Common common{bridge(), runtime_, name, allreduce_operation(*runtime_, op, scale, priority, wire),
                             label};
  py::gil_scoped_release release;
  mxnet::push_reducescatter(common, handle(input), handle(output));
}

namespace {

std::vector<mxnet::ArrayShard> array_shards(const Group::Division& division) {
  std::vector<mxnet::ArrayShard> shards;
  for (const auto& [array, begin, count, root] : division) shards.push_back({array, begin, count, root});
  return shards;
}

}  // namespace

void Group::push_reduce_to_owners(const std::string& name, const Handles& arrays, const Division& division,
                                  const Handles& own, const Handles& next, const std::string& op, double scale,
                                  int priority, const std::string& label, const std::string& wire) {
  const mxnet::Common common{bridge(), runtime_, name, allreduce_operation(*runtime_, op, scale, priority, wire),
                             label};
  py::gil_scoped_release release;
  mxnet::push_reduce_to_owners(common, handles(arrays), array_shards(division), handles(own), handles(next));
}

void Group::push_gather_from_owners(const std::string& name, const Handles& arrays, const Division& division,
                                    int priority, const std::string& label, const std::string& turn_of,
                                    const Handles& fenced) {
  const mxnet::Common common{bridge(), runtime_, name, broadcast_operation(0, priority), label};
  py::gil_scoped_release release;
  mxnet::push_gather_from_owners(common, handles(arrays), array_shards(division), turn_of, handles(fenced));
}

void Group::refuse(const std::string& name, const std::string& reason, const std::string& turn_of) {
  Request request;
  request.name = name;
  request.turn = turn_of.empty() ? runtime_->take_turn(name) : runtime_->last_turn(turn_of);
  request.ticket = runtime_->take_ticket();
  request.signature = "a refusal";
  request.refusal = reason.empty() ? "no reason was given" : reason;
  request.done = [](const std::string*) {};
  const std::shared_ptr<Runtime> target = runtime_;
  py::gil_scoped_release release;
  target->post(std::move(request));
}

}  // namespace mykv
