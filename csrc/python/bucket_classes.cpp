#include <pybind11/stl.h>

#include "python/bindings.h"
#include "python/buckets.h"

namespace py = pybind11;

namespace mykv {

void bind_buffer(py::module_& m) {
  py::class_<Buffer, std::shared_ptr<Buffer>>(m, "Buffer", py::buffer_protocol(),
                                              "Memory in the host's shared segment, zeroed; keeps the core alive.")
      .def_buffer([](const Buffer& b) {
        return py::buffer_info(b.data(), 1, py::format_descriptor<uint8_t>::format(),
                               static_cast<py::ssize_t>(b.bytes()));
      })
      .def("commit", &Buffer::commit, py::arg("nbytes"), py::call_guard<py::gil_scoped_release>(),
           "Take memory for the first `nbytes` bytes; raises Error when there is none left.")
      .def_property_readonly(
          "attached", [](const Buffer& b) { return !b.runtime()->left(); }, "Whether its group still runs.")
      .def_property_readonly("nbytes", &Buffer::bytes);
}

void bind_fence(py::module_& m) {
  py::class_<Fence>(
      m, "Fence",
      "An operation of MXNet's engine without effect: reading one of its arrays waits for all operations\n"
      "that were pushed on any of its arrays.")
      .def(py::init<const Handles&, const Handles&, uint64_t, std::string>(), py::arg("arrays"),
           py::arg("gradients") = Handles(), py::arg("key") = 0, py::arg("names") = "",
           "names: what the names of the operations that sum the gradients begin with.")
      .def("begin", &Fence::begin,
           "Call this before updates from the gradients: if they fail on this rank and the gradients carry no error,\n"
           "take_failed_updates() has the key.")
      .def("push", &Fence::push, py::arg("ends_step") = false, py::arg("broken") = false,
           "Put it behind the operations that are pushed by now. With ends_step these are updates of a step; with\n"
           "broken some of the updates were not pushed.");
}

}  // namespace mykv
