#include <pybind11/stl.h>

#include "python/group_class.h"

namespace py = pybind11;

namespace mykv {

void bind_pushes(py::module_& m, GroupClass& group) {
  const auto [name, op, scale, priority, label, turn_of, wire] = OperationArguments();
  const py::arg inputs("inputs"), outputs("outputs");
  bind_method(m, group, "push_allreduce", &Group::push_allreduce, name, inputs, outputs, op, scale, priority, label,
              wire, turn_of);
  bind_method(m, group, "push_broadcast", &Group::push_broadcast, name, py::arg("input"), outputs, py::arg("root") = 0,
              priority, label, turn_of);
  bind_method(m, group, "push_group", &Group::push_group, name, inputs, outputs, op, scale, priority, label, wire,
              turn_of);
}

}  // namespace mykv
