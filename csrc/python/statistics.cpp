#include "python/statistics.h"

#include <pybind11/stl.h>

#include "mxnet/step_clock.h"
#include "operations/request.h"
#include "python/groups.h"

namespace py = pybind11;

namespace mykv {

namespace {

void set_step_part(const std::string& part) {
  if (part.empty()) {
    next_step_part = StepPart::none;
  } else if (part == "some") {
    next_step_part = StepPart::some;
  } else if (part == "last") {
    next_step_part = StepPart::last;
  } else if (part == "weights") {
    next_step_part = StepPart::weights;
  } else {
    throw py::value_error("no part of a step: " + part);
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
      "Counts since the group was made: ways {name: (operations, bytes)} and steps, that have a result; waited_ns,\n"
      "step_waited_ns: how long this rank waited for others; late [(rank, operations, ns, steps, ns)]: how often a\n"
      "rank came last, and how long the others waited on average. Rank 0 knows this of all ranks, others of their\n"
      "host.");
  m.def("statistics", [] { return statistics(*require_world()); });
  m.def(
      "set_step_part", &set_step_part, py::arg("part"),
      "What this thread's next operations are: 'last' (the sum of the gradients that backward writes last; it counts\n"
      "for the next operation only, and 'some' follows), 'some' (of a step), 'weights' (that were updated), or ''.");
  m.def("step_times", &step_times, "Times of the training steps of this process, see csrc/mxnet/step_clock.h.");
}

}  // namespace mykv
