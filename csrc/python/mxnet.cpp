#include <pybind11/stl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <optional>
#include <tuple>
#include <vector>

#include "mxnet/gradient_norm.h"
#include "python/arguments.h"
#include "python/bindings.h"
#include "python/group.h"
#include "python/without_gil.h"

namespace py = pybind11;

namespace mykv {

namespace {

// MXNet's fork handler joins the threads that run Python operators. Such a thread may still have to free an operator,
// for which it needs the GIL. So this fork runs without the GIL.
void join_operator_threads() {
  const pid_t child = fork();
  if (child == 0) _exit(0);
  while (child > 0 && waitpid(child, nullptr, 0) == -1 && errno == EINTR) {
  }
}

}  // namespace

void bind_mxnet(py::module_& m) {
  m.def("take_failed_updates", &mxnet::take_failed_updates,
        "Keys of fences whose updates have failed on this rank alone, and of failed broadcasts, since the last call.");
  m.def("pushed_operations", &mxnet::pushed_operations,
        "How many operations on MXNet's arrays were handed to its engine in this process; they may end much later.");
  m.def("failed_operations", &mxnet::failed_operations,
        "How many operations on MXNet's arrays have failed in this process.");
  m.def("failed_in_steps", &mxnet::failed_in_steps, py::arg("names"),
        "How many operations of a trainer's steps have failed in this process; `names`: the prefix of their names.");
  m.def(
      "failures",
      [] {
        py::dict result;
        for (const auto& [code, failed] : mxnet::failures()) {
          result[name_of(code)] = std::make_pair(failed.operations, failed.last);
        }
        return result;
      },
      "The same by the `code` of their errors: (count, text of the last error). Arrays carry only the texts.");
  m.def(
      "attach_mxnet",
      [](uintptr_t library, int major, bool blocking, const py::object& error_type) {
        set_failure_type(error_type);
        attach_bridge(std::make_unique<mxnet::Bridge>(mxnet::Api(reinterpret_cast<void*>(library), major), blocking));
      },
      py::arg("dl_handle"), py::arg("major"), py::arg("blocking") = false, py::arg("error_type") = py::none(),
      "Use the MXNet library behind this dlopen handle. With an engine that blocks in each push (NaiveEngine), push_*\n"
      "raises `error_type` when an operation fails; otherwise the error is in the operation's arrays.");
  m.def(
      "push_failing",
      [](uintptr_t array, const Reason& reason) {
        const WithoutGil release;
        bridge().push_failing(reinterpret_cast<mxnet::Handle>(array), reason.text);
      },
      py::arg("array"), py::arg("reason"), "An operation of MXNet's engine that only fails: the array gets the error.");
  m.def("join_operator_threads", &join_operator_threads, py::call_guard<WithoutGil>(),
        "Let MXNet end the threads of its Python operators. The engine must be idle.");
}

namespace {

void push_sum_of_squares(const std::vector<std::tuple<uintptr_t, size_t, size_t>>& pieces, uintptr_t squares,
                         std::optional<double> begin, int priority) {
  std::vector<mxnet::Piece> read;
  for (const auto& [array, first, count] : pieces) read.push_back({handle(array), first, count});
  const mxnet::Bridge& target = bridge();
  WithoutGil release;
  mxnet::push_sum_of_squares(target, read, handle(squares), begin, priority);
}

void push_clip(const Handles& arrays, uintptr_t squares, double factor, double most, int priority) {
  const std::vector<mxnet::Handle> written = handles(arrays);
  const mxnet::Bridge& target = bridge();
  WithoutGil release;
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
