// Python's class Group.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <utility>

#include "mxnet/step_clock.h"
#include "operations/request.h"
#include "python/group.h"
#include "python/work.h"

namespace py = pybind11;

namespace mykv {

using GroupClass = pybind11::class_<Group, std::shared_ptr<Group>>;

// Binds a method of Group, and a module function that calls it for the world.
template <class Result, class... Arguments, class... Extra>
void bind_method(pybind11::module_& m, GroupClass& group, const char* name, Result (Group::*method)(Arguments...),
                 const Extra&... extra) {
  group.def(name, method, extra...);
  m.def(
      name,
      [method](Arguments... arguments) {
        // Another thread may shut the world down while this thread runs without the GIL.
        const std::shared_ptr<Group> kept = require_world();
        return ((*kept).*method)(std::forward<Arguments>(arguments)...);
      },
      extra...);
}

// Binds a number or a list of the group's world in the same way.
template <class Get>
void bind_fact(pybind11::module_& m, GroupClass& group, const char* name, Get get) {
  group.def(name, [get](const Group& g) { return get(g.world()); });
  m.def(name, [get] { return get(require_world()->world()); });
}

// The arguments that most methods for operations have, with their defaults.
struct OperationArguments {
  pybind11::arg name{"name"};
  pybind11::arg_v op = pybind11::arg("op") = "sum";
  pybind11::arg_v scale = pybind11::arg("scale") = 1.0;
  pybind11::arg_v priority = pybind11::arg("priority") = 0;
  pybind11::arg_v label = pybind11::arg("label") = "";
  pybind11::arg_v turn_of = pybind11::arg("turn_of") = "";
  pybind11::arg_v wire = pybind11::arg("wire") = "";  // between hosts: a type, or a compressor; '': unchanged
};

void bind_group(pybind11::module_& m);
// bind_group() calls these, each for some of the methods:
void bind_submits(pybind11::module_& m, GroupClass& group);  // operations on arrays of numpy
void bind_memory(pybind11::module_& m, GroupClass& group);   // memory of the host and of GPUs, and operations on it
void bind_pushes(pybind11::module_& m, GroupClass& group);   // operations of MXNet's engine on whole arrays
void bind_pieces(pybind11::module_& m, GroupClass& group);   // the same with a piece for or from each rank
void bind_waits(pybind11::module_& m, GroupClass& group);    // refusing, giving up, queries about waits

void bind_submits(py::module_& m, GroupClass& group) {
  const auto [name, op, scale, priority, label, turn_of, wire] = OperationArguments();
  const auto root = py::arg("root") = 0;
  const py::arg outputs("outputs");
  bind_method(m, group, "submit_allreduce", &Group::submit_allreduce, name, py::arg("inputs"), outputs, op, scale,
              priority, label, wire, turn_of);
  bind_method(m, group, "submit_broadcast", &Group::submit_broadcast, name, py::arg("input"), outputs, root, priority,
              label);
}

void bind_memory(py::module_& m, GroupClass& group) {
  const auto [name, op, scale, priority, label, turn_of, wire] = OperationArguments();
  const py::arg dtype("dtype");
  bind_method(m, group, "reserve", &Group::reserve, py::arg("nbytes"));
  bind_method(m, group, "allocate", &Group::allocate, py::arg("nbytes"));
  bind_method(m, group, "submit_bucket", &Group::submit_bucket, name, py::arg("buffer"), py::arg("begin"),
              py::arg("count"), dtype, py::arg("layout") = "", op, scale, priority, wire,
              py::arg("shards") = BucketShards());
  bind_method(m, group, "submit_on_gpu", &Group::submit_on_gpu, name, py::arg("kind"), dtype, py::arg("shape"),
              py::arg("memory"), op, scale, py::arg("root") = 0, priority, py::arg("label") = "", wire);
}

void bind_pushes(py::module_& m, GroupClass& group) {
  const auto [name, op, scale, priority, label, turn_of, wire] = OperationArguments();
  const py::arg inputs("inputs"), outputs("outputs");
  bind_method(m, group, "push_allreduce", &Group::push_allreduce, name, inputs, outputs, op, scale, priority, label,
              wire, turn_of);
  bind_method(m, group, "push_broadcast", &Group::push_broadcast, name, py::arg("input"), outputs, py::arg("root") = 0,
              priority, label, turn_of, py::arg("key") = 0,
              "If the broadcast fails and the key is not 0, take_failed_updates() has the key.");
  bind_method(m, group, "push_group", &Group::push_group, name, inputs, outputs, op, scale, priority, label, wire,
              turn_of);
}

void bind_pieces(py::module_& m, GroupClass& group) {
  const auto [name, op, scale, priority, label, turn_of, wire] = OperationArguments();
  const py::arg input("input"), output("output"), rows("rows"), arrays("arrays"), division("division");
  bind_method(m, group, "push_allgather", &Group::push_allgather, name, input, output, rows, priority, label);
  bind_method(m, group, "push_alltoall", &Group::push_alltoall, name, input, output, rows, priority, label);
  bind_method(m, group, "refuse_alltoall", &Group::refuse_alltoall, name, input, rows, py::arg("reason"),
              "Refuse, in place of push_alltoall, what the other ranks push.");
  bind_method(m, group, "push_reducescatter", &Group::push_reducescatter, name, input, output, op, scale, priority,
              label, wire, turn_of);
  bind_method(m, group, "push_reduce_to_owners", &Group::push_reduce_to_owners, name, arrays, division, py::arg("own"),
              py::arg("next") = Handles(), op, scale, priority, label, wire);
  bind_method(m, group, "push_gather_from_owners", &Group::push_gather_from_owners, name, arrays, division, priority,
              label, turn_of, py::arg("fenced") = Handles());
}

void bind_waits(py::module_& m, GroupClass& group) {
  bind_method(m, group, "refuse", &Group::refuse, py::arg("name"), py::arg("reason"), py::arg("turn_of") = "");
  bind_method(
      m, group, "waiting", &Group::waiting, py::arg("name") = "", py::arg("least_seconds") = 0.0,
      "The ranks that operations wait for: (name, seconds, ranks that have not arrived, ranks that do not respond),\n"
      "the longest wait first. Asks the other hosts.");
  bind_method(
      m, group, "waiting_for_this", &Group::waiting_for_this, py::arg("names"), py::arg("turn_of") = "",
      "For each name the ranks that wait in this rank's next operation under it, which it has not started; with\n"
      "turn_of: in the operation with the last turn under that name.");
  bind_method(m, group, "last_turn", &Group::last_turn, py::arg("name"),
              "The turn of the last call under a name; 0 if there was none.");
  bind_method(m, group, "forget", &Group::forget, py::arg("prefix"),
              "Drop the state of names that begin with this, after the last call under them.");
  bind_method(
      m, group, "give_up", &Group::give_up, py::arg("name"), py::arg("reason"), py::arg("code") = "given_up",
      py::arg("ranks") = std::vector<int>(), py::arg("least_seconds") = 0.0,
      "End the operation under `name` on all ranks, unless all of them have arrived, or this rank has waited in it\n"
      "for less than `least_seconds`. The error has this code and names these ranks.");
}

// The statistics as Python sees them.

// Counts of a group's operations on this rank, and how late the group's ranks were. With several hosts only rank 0
// knows this of all ranks, other ranks of their host.
pybind11::dict statistics(const Group& group);
void bind_statistics(pybind11::module_& m, pybind11::class_<Group, std::shared_ptr<Group>>& group);

namespace {

void set_step_phase(const std::string& phase) {
  if (phase.empty()) {
    next_step_phase = StepPhase::none;
  } else if (phase == "some") {
    next_step_phase = StepPhase::some;
  } else if (phase == "last") {
    next_step_phase = StepPhase::last;
  } else if (phase == "weights") {
    next_step_phase = StepPhase::weights;
  } else {
    throw py::value_error("no phase of a step: " + phase);
  }
}

py::dict step_times() {
  const mxnet::StepTimes times = mxnet::step_times();
  py::dict result;
  result["summing_ns"] = times.summing_ns;
  result["overlapped_ns"] = times.overlapped_ns;
  result["updating_ns"] = times.updating_ns;
  return result;
}

}  // namespace

py::dict statistics(const Group& group) {
  const std::shared_ptr<Runtime> asked = group.runtime();
  const Totals totals = asked->totals();
  py::dict ways;
  for (size_t way = 0; way < totals.ways.size(); ++way) {
    ways[Totals::kWays[way]] = std::make_pair(totals.ways[way].operations, totals.ways[way].bytes);
  }
  py::list late;
  for (const LateRank& one : asked->late_ranks()) {
    late.append(py::make_tuple(one.rank, one.operations, one.operations_ns, one.steps, one.steps_ns));
  }
  py::dict result;
  result["ways"] = ways;
  result["steps"] = totals.steps;
  result["waited_ns"] = totals.waited_ns;
  result["step_waited_ns"] = totals.step_waited_ns;
  result["late"] = late;
  return result;
}

void bind_statistics(py::module_& m, py::class_<Group, std::shared_ptr<Group>>& group) {
  group.def(
      "statistics", &statistics,
      "Counts since the group was created: ways {name: (operations, bytes)} and steps, that have a result; waited_ns,\n"
      "step_waited_ns: how long this rank waited for others; late [(rank, operations, ns, steps, ns)]: how often a\n"
      "rank came last, and how long the others waited on average. Rank 0 knows this of all ranks, others of their\n"
      "host.");
  m.def("statistics", [] { return statistics(*require_world()); });
  m.def("set_step_phase", &set_step_phase, py::arg("phase"),
        "The phase of this thread's next operations: 'last' (sums the gradients that backward writes last; it holds\n"
        "for the next operation only, and 'some' follows), 'some' (of a step), 'weights' (that were updated), or ''.");
  m.def("step_times", &step_times, "Times of the training steps of this process, see csrc/mxnet/step_clock.h.");
}

void bind_group(py::module_& m) {
  GroupClass group(
      m, "Group",
      "A group of ranks, with its own runtime and shared memory. Its methods are those of the module,\n"
      "which act on the world; ranks and roots count within the group, messages call ranks by their labels.");
  bind_fact(m, group, "rank", [](const World& w) { return w.rank(); });
  bind_fact(m, group, "size", [](const World& w) { return w.size(); });
  bind_fact(m, group, "local_rank", [](const World& w) { return w.local_rank(); });
  bind_fact(m, group, "local_size", [](const World& w) { return w.local_size(); });
  bind_fact(m, group, "cross_rank", [](const World& w) { return w.cross_rank(); });
  bind_fact(m, group, "cross_size", [](const World& w) { return w.cross_size(); });
  bind_fact(m, group, "why_memory_is_not_shared", [](const World& w) { return w.why_memory_is_not_shared(); });
  bind_fact(m, group, "rejected_callers", [](const World& w) { return w.rejected_callers(); });
  bind_method(m, group, "agreement_traffic", &Group::agreement_traffic);
  bind_method(m, group, "exchange_traffic", &Group::exchange_traffic);
  bind_method(
      m, group, "gpu_road", &Group::gpu_road,
      "(whether some rank has a GPU, whether NCCL serves all ranks, why not, whether MYKV_GPU chose host memory).");
  bind_fact(m, group, "host_ranks", [](const World& w) { return w.hosts(); });
  group.def("leave", &Group::leave, py::arg("reason"), "Tell the other ranks that this rank leaves, and stop.");
  group.def("shutdown", [](Group& g) { g.leave({"it shut mykv down"}); });
  bind_submits(m, group);
  bind_memory(m, group);
  bind_pushes(m, group);
  bind_pieces(m, group);
  bind_waits(m, group);
  bind_statistics(m, group);
}

}  // namespace mykv
