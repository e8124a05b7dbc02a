#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "python/group_class.h"
#include "python/work.h"

namespace py = pybind11;

namespace mykv {

void bind_calls(py::module_& m, GroupClass& group) {
  const auto op = py::arg("op") = "sum";
  const auto scale = py::arg("scale") = 1.0;
  const auto root = py::arg("root") = 0;
  const auto priority = py::arg("priority") = 0;
  const auto label = py::arg("label") = "";
  const auto turn_of = py::arg("turn_of") = "";
  const auto wire = py::arg("wire") = "";  // between hosts: a type of values, or a compressor; '': unchanged
  const py::arg name("name"), inputs("inputs"), outputs("outputs"), input("input"), output("output"), rows("rows");
  bind_method(m, group, "submit_allreduce", &Group::submit_allreduce, name, inputs, outputs, op, scale, priority, label,
              wire);
  bind_method(m, group, "submit_broadcast", &Group::submit_broadcast, name, input, outputs, root, priority, label);
  bind_method(m, group, "submit_on_gpu", &Group::submit_on_gpu, name, py::arg("kind"), py::arg("dtype"),
              py::arg("shape"), py::arg("memory"), op, scale, root, priority, label, wire);
  bind_method(m, group, "push_allreduce", &Group::push_allreduce, name, inputs, outputs, op, scale, priority, label,
              wire, turn_of);
  bind_method(m, group, "push_broadcast", &Group::push_broadcast, name, input, outputs, root, priority, label, turn_of);
  bind_method(m, group, "push_group", &Group::push_group, name, inputs, outputs, op, scale, priority, label, wire,
              turn_of);
  bind_method(m, group, "push_allgather", &Group::push_allgather, name, input, output, rows, priority, label);
  bind_method(m, group, "push_alltoall", &Group::push_alltoall, name, input, output, rows, priority, label);
  bind_method(m, group, "push_reducescatter", &Group::push_reducescatter, name, input, output, op, scale, priority,
              label, wire, turn_of);
  const py::arg arrays("arrays"), division("division");
  bind_method(m, group, "push_reduce_to_owners", &Group::push_reduce_to_owners, name, arrays, division, py::arg("own"),
              py::arg("next") = Handles(), op, scale, priority, label, wire);
  bind_method(m, group, "push_gather_from_owners", &Group::push_gather_from_owners, name, arrays, division, priority,
              label, turn_of, py::arg("fenced") = Handles());
  bind_method(m, group, "submit_bucket", &Group::submit_bucket, name, py::arg("buffer"), py::arg("begin"),
              py::arg("count"), py::arg("dtype"), py::arg("layout") = "", op, scale, priority, wire,
              py::arg("shards") = BucketShards());
}

}  // namespace mykv
