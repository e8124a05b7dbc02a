#include "mxnet/gradient_norm.h"

#include <pybind11/stl.h>

#include <optional>
#include <tuple>
#include <vector>

#include "python/arguments.h"
#include "python/attached_bridge.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace mykv {

namespace {

void push_sum_of_squares(const std::vector<std::tuple<uintptr_t, size_t, size_t>>& pieces, uintptr_t squares,
                         std::optional<double> begin, int priority) {
  std::vector<mxnet::Piece> read;
  for (const auto& [array, first, count] : pieces) read.push_back({handle(array), first, count});
  const mxnet::Bridge& target = bridge();
  py::gil_scoped_release release;
  mxnet::push_sum_of_squares(target, read, handle(squares), begin, priority);
}

void push_clip(const Handles& arrays, uintptr_t squares, double factor, double most, int priority) {
  const std::vector<mxnet::Handle> written = handles(arrays);
  const mxnet::Bridge& target = bridge();
  py::gil_scoped_release release;
  mxnet::push_clip(target, written, handle(squares), factor, most, priority);
}

}  // namespace

void bind_gradient_norm(py::module_& m) {
  m.def("push_sum_of_squares", &push_sum_of_squares, py::arg("pieces"), py::arg("squares"), py::arg("begin") = 0.0,
        py::arg("priority") = 0,
        "squares[0] = begin + the sum of squares of (array, first, count) pieces, in this rank's engine alone. With "
        "begin=None the sum is added.");
  m.def("push_clip", &push_clip, py::arg("arrays"), py::arg("squares"), py::arg("factor"), py::arg("most"),
        py::arg("priority") = 0, "Scale arrays so that factor * sqrt(squares[0]) would be at most `most`.");
  m.def("clipping_factor", &mxnet::clipping_factor, py::arg("squares"), py::arg("factor"), py::arg("most"),
        "The factor by which push_clip scales arrays.");
}

}  // namespace mykv
