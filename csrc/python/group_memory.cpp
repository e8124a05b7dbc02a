#include <pybind11/stl.h>

#include "python/group_class.h"
#include "python/work.h"

namespace py = pybind11;

namespace mykv {

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

}  // namespace mykv
