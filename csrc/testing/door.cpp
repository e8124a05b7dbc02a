#include "world/door.h"

#include <pybind11/pybind11.h>

#include <string>

#include "base/error.h"
#include "testing/bindings.h"

namespace py = pybind11;

namespace mykv {

namespace {

// A door with a name and a secret of its own.
struct OwnDoor {
  OwnDoor() {
    std::string refused;
    if (!door.open(name, &refused)) throw Error(refused);
  }

  Token name = random_token();
  Token secret = random_token();
  Door door;
};

py::bytes bytes_of(const Token& token) { return {reinterpret_cast<const char*>(token.bytes), sizeof token.bytes}; }

}  // namespace

void bind_door(py::module_& m) {
  py::class_<OwnDoor>(m, "Door", "The door at which ranks of one host ask for a descriptor, without ranks.")
      .def(py::init<>())
      .def_property_readonly("name", [](const OwnDoor& one) { return bytes_of(one.name); })
      .def_property_readonly("secret", [](const OwnDoor& one) { return bytes_of(one.secret); })
      .def(
          "attend", [](OwnDoor& one, int fd, int ms) { one.door.attend(one.secret, fd, ms); }, py::arg("fd"),
          py::arg("ms"))
      .def("served", [](const OwnDoor& one) { return one.door.served(); })
      .def("rejected_callers", [](const OwnDoor& one) { return one.door.rejected_callers(); });
}

}  // namespace mykv
