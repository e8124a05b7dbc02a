#include "python/group.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "base/forks.h"
#include "operations/signature.h"
#include "python/arguments.h"
#include "python/bindings.h"
#include "python/without_gil.h"
#include "world/communicator.h"

namespace py = pybind11;

namespace mykv {

namespace {

// Every runtime that may still run.
struct Runtimes {
  std::mutex mutex;
  std::vector<std::weak_ptr<Runtime>> all;
};
Runtimes& all_runtimes() { return usable_in_forks<Runtimes>(); }

}  // namespace

void register_runtime(const std::shared_ptr<Runtime>& runtime) {
  std::lock_guard<std::mutex> lock(all_runtimes().mutex);
  auto& all = all_runtimes().all;
  all.erase(std::remove_if(all.begin(), all.end(), [](const auto& one) { return one.expired(); }), all.end());
  all.push_back(runtime);
}

std::vector<std::weak_ptr<Runtime>> runtimes() {
  std::lock_guard<std::mutex> lock(all_runtimes().mutex);
  return all_runtimes().all;
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
  for (const std::weak_ptr<Runtime>& one : runtimes()) {
    if (const std::shared_ptr<Runtime> runtime = one.lock()) runtime->leave(reason);
  }
}

void lose_all(const Failure& reason) {
  RevokeOnDeath::lose();
  std::lock_guard<std::mutex> lock(all_runtimes().mutex);
  for (const std::weak_ptr<Runtime>& one : all_runtimes().all) {
    if (const std::shared_ptr<Runtime> runtime = one.lock()) runtime->lose(reason);
  }
}

namespace {

std::unique_ptr<mxnet::Bridge>& g_bridge = *new std::unique_ptr<mxnet::Bridge>;

}  // namespace

const mxnet::Bridge& bridge() {
  if (!g_bridge) throw Error("mykv is not attached to MXNet");
  return *g_bridge;
}

void attach_bridge(std::unique_ptr<mxnet::Bridge> made) {
  if (g_bridge) keep_forever(std::move(g_bridge));  // another thread may be in a push, without the GIL
  g_bridge = std::move(made);
}

Group::Group(MPI_Comm comm, const RuntimeOptions& options) {
  WithoutGil release;
  runtime_ = std::make_shared<Runtime>(comm, options);
  register_runtime(runtime_);
}

Group::~Group() {
  WithoutGil release;
  runtime_->leave("it shut mykv down");
}

std::vector<uint64_t> Group::agreement_traffic() {
  const Agreement& agreement = runtime_->agreement();
  return {agreement.sent().messages, agreement.sent().bytes, agreement.received().messages, agreement.received().bytes};
}

void Group::leave(const Reason& reason) {
  const std::shared_ptr<Runtime> leaving = runtime_;
  WithoutGil release;
  leaving->leave(reason.text);
}

std::vector<Group::WaitingTuple> Group::waiting(const std::string& name, double least_seconds) {
  const std::shared_ptr<Runtime> asked = runtime_;
  WithoutGil release;
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
  WithoutGil release;
  std::vector<std::vector<int>> result;
  for (const std::vector<int>& ranks : asked->waiting_for_this(names, turn_of))
    result.push_back(asked->world().labels(ranks));
  return result;
}

void Group::give_up(const std::string& name, const Reason& reason, const std::string& code, std::vector<int> ranks,
                    double least_seconds) {
  const Failure failure(reason.text, error_code_of(code), std::move(ranks));
  const std::shared_ptr<Runtime> asked = runtime_;
  WithoutGil release;
  asked->give_up({{name, failure}}, least_seconds);
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

std::unique_ptr<Work> Group::post(Request request, std::vector<py::array> kept, const std::string& turn_of) {
  request.turn = turn_of.empty() ? runtime_->take_turn(request.name) : runtime_->last_turn(turn_of);
  request.ticket = runtime_->take_ticket();
  request.step = take_step_phase();
  request.awaited = runtime_->may_stand_in();
  auto work = std::make_unique<Work>(std::move(kept), runtime_);
  request.done = [state = work->state()](const Failure* error) { state->finish(error); };
  const std::shared_ptr<Runtime> target = runtime_;
  WithoutGil release;
  target->post(std::move(request));
  return work;
}

std::shared_ptr<Buffer> Group::reserve(size_t bytes) {
  drop_returned_memory();
  return std::make_shared<Buffer>(runtime_, bytes);
}

std::shared_ptr<Buffer> Group::allocate(size_t bytes) {
  const std::shared_ptr<Buffer> buffer = reserve(bytes);
  WithoutGil release;
  buffer->commit(bytes);
  return buffer;
}

void Group::push_allreduce(const std::string& name, const Handles& inputs, const Handles& outputs,
                           const std::string& op, double scale, int priority, const std::string& label,
                           const std::string& wire, const std::string& turn_of) {
  const mxnet::Common common{bridge(), runtime_, name, allreduce_operation(*runtime_, op, scale, priority, wire),
                             label,    turn_of};
  WithoutGil release;
  mxnet::push_allreduce(common, handles(inputs), handles(outputs));
}

void Group::push_broadcast(const std::string& name, uintptr_t input, const Handles& outputs, int root, int priority,
                           const std::string& label, const std::string& turn_of, uint64_t key) {
  const mxnet::Common common{bridge(), runtime_, name, broadcast_operation(root, priority), label, turn_of, key};
  WithoutGil release;
  mxnet::push_broadcast(common, handle(input), handles(outputs));
}

void Group::push_group(const std::string& name, const Handles& inputs, const Handles& outputs, const std::string& op,
                       double scale, int priority, const std::string& label, const std::string& wire,
                       const std::string& turn_of) {
  const mxnet::Common common{bridge(), runtime_, name, allreduce_operation(*runtime_, op, scale, priority, wire),
                             label,    turn_of};
  WithoutGil release;
  mxnet::push_group(common, handles(inputs), handles(outputs));
}

void Group::push_allgather(const std::string& name, uintptr_t input, uintptr_t output, const std::vector<size_t>& rows,
                           int priority, const std::string& label) {
  const mxnet::Common common{bridge(), runtime_, name, broadcast_operation(0, priority), label};
  WithoutGil release;
  mxnet::push_allgather(common, handle(input), handle(output), rows);
}

void Group::push_alltoall(const std::string& name, uintptr_t input, uintptr_t output,
                          const std::vector<std::vector<size_t>>& rows, int priority, const std::string& label) {
  const mxnet::Common common{bridge(), runtime_, name, broadcast_operation(0, priority), label};
  WithoutGil release;
  mxnet::push_alltoall(common, handle(input), handle(output), rows);
}

void Group::refuse_alltoall(const std::string& name, uintptr_t input, const std::vector<std::vector<size_t>>& rows,
                            const Reason& reason) {
  const mxnet::Common common{bridge(), runtime_, name, broadcast_operation(0, 0), ""};
  WithoutGil release;
  mxnet::refuse_alltoall(common, handle(input), rows, reason.text);
}

void Group::push_reducescatter(const std::string& name, uintptr_t input, uintptr_t output, const std::string& op,
                               double scale, int priority, const std::string& label, const std::string& wire,
                               const std::string& turn_of) {
  const mxnet::Common common{bridge(), runtime_, name, allreduce_operation(*runtime_, op, scale, priority, wire),
                             label,    turn_of};
  WithoutGil release;
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
  WithoutGil release;
  mxnet::push_reduce_to_owners(common, handles(arrays), array_shards(division), handles(own), handles(next));
}

void Group::push_gather_from_owners(const std::string& name, const Handles& arrays, const Division& division,
                                    int priority, const std::string& label, const std::string& turn_of,
                                    const Handles& fenced) {
  const mxnet::Common common{bridge(), runtime_, name, broadcast_operation(0, priority), label, turn_of};
  WithoutGil release;
  mxnet::push_gather_from_owners(common, handles(arrays), array_shards(division), handles(fenced));
}

void Group::refuse(const std::string& name, const Reason& reason, const std::string& turn_of) {
  const uint64_t turn = turn_of.empty() ? runtime_->take_turn(name) : runtime_->last_turn(turn_of);
  const std::shared_ptr<Runtime> target = runtime_;
  WithoutGil release;
  target->refuse(name, turn, reason.text);
}

// Operations of a Group on arrays of numpy.

namespace {

DType dtype_of(const py::array& array) { return dtype_named(py::cast<std::string>(py::str(array.dtype()))); }

void require_contiguous(const py::array& array, bool writeable) {
  if (!(array.flags() & py::array::c_style)) throw py::value_error("mykv takes C-contiguous arrays only");
  if (writeable && !array.writeable()) throw py::value_error("an output array is read-only");
}

}  // namespace

std::unique_ptr<Work> Group::submit(const std::string& name, Operation operation, const std::vector<py::array>& inputs,
                                    const std::vector<py::array>& outputs, const std::string& label,
                                    const std::string& turn_of) {
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
    // A single array is copied by memcpy, even if unaligned; several arrays are summed in place.
    if (inputs.size() > 1 && !(array.flags() & py::detail::npy_api::NPY_ARRAY_ALIGNED_)) {
      throw py::value_error("one of several input arrays is not aligned to its items");
    }
    request.inputs.push_back(array.data());
  }
  for (const py::array& array : outputs) request.outputs.push_back(const_cast<void*>(array.data()));
  request.operation = operation;
  request.signature = signature_of(operation, shape, world().label(operation.root), label);
  return post(std::move(request), std::move(kept), turn_of);
}

std::unique_ptr<Work> Group::submit_allreduce(const std::string& name, const std::vector<py::array>& inputs,
                                              const std::vector<py::array>& outputs, const std::string& op,
                                              double scale, int priority, const std::string& label,
                                              const std::string& wire, const std::string& turn_of) {
  if (inputs.empty()) throw py::value_error("an allreduce needs an input array");
  return submit(name, allreduce_operation(*runtime_, op, scale, priority, wire), inputs, outputs, label, turn_of);
}

std::unique_ptr<Work> Group::submit_broadcast(const std::string& name, const std::optional<py::array>& input,
                                              const std::vector<py::array>& outputs, int root, int priority,
                                              const std::string& label) {
  std::vector<py::array> inputs;
  if (input) inputs.push_back(*input);
  if (!input && root == world().rank()) throw py::value_error("the root of a broadcast needs an input array");
  return submit(name, broadcast_operation(root, priority), inputs, outputs, label);
}

}  // namespace mykv
