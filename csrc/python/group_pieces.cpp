#include <pybind11/stl.h>

#include "python/group_class.h"

namespace py = pybind11;

namespace mykv {

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

}  // namespace mykv
