#include <pybind11/stl.h>

#include "python/bindings.h"
#include "python/buckets.h"

namespace py = pybind11;

namespace mykv {

void bind_prepared(py::module_& m) {
  py::class_<PreparedBucket>(
      m, "PreparedBucket", "The same as an operation of MXNet's engine that writes `arrays`, which lie in the bucket.")
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
           "Start it once more. The label must be the same on all ranks, and shows in the error where it is not. With\n"
           "turn_of it takes the last turn under that name.");
}

}  // namespace mykv
