#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "python/group_class.h"
#include "python/work.h"

namespace py = pybind11;

namespace mykv {

void bind_submits(py::module_& m, GroupClass& group) {
  const auto [name, op, scale, priority, label, turn_of, wire] = OperationArguments();
  const auto root = py::arg("root") = 0;
  const py::arg outputs("outputs");
  bind_method(m, group, "submit_allreduce", &Group::submit_allreduce, name, py::arg("inputs"), outputs, op, scale,
              priority, label, wire, turn_of);
  bind_method(m, group, "submit_broadcast", &Group::submit_broadcast, name, py::arg("input"), outputs, root, priority,
              label);
}

}  // namespace mykv
