#include <pybind11/stl.h>

#include "python/group_class.h"

namespace py = pybind11;

namespace mykv {

void bind_waits(py::module_& m, GroupClass& group) {
  bind_method(m, group, "refuse", &Group::refuse, py::arg("name"), py::arg("reason"), py::arg("turn_of") = "");
  bind_method(
      m, group, "waiting", &Group::waiting, py::arg("name") = "", py::arg("least_seconds") = 0.0,
      "For whom operations under way wait: (name, seconds, ranks that have not come, ranks that do not respond),\n"
      "the longest wait first. Asks the other hosts.");
  bind_method(
      m, group, "waiting_for_this", &Group::waiting_for_this, py::arg("names"), py::arg("turn_of") = "",
      "For each name the ranks that have come to the operation which this rank will ask for next under it; with\n"
      "turn_of to the one that has the last turn under that name.");
  bind_method(m, group, "last_turn", &Group::last_turn, py::arg("name"),
              "The turn of the last call under a name; 0 if there was none.");
  bind_method(m, group, "forget", &Group::forget, py::arg("prefix"),
              "Drop what is kept for names that begin with this, after the last call under them.");
  bind_method(
      m, group, "give_up", &Group::give_up, py::arg("name"), py::arg("reason"), py::arg("code") = "given_up",
      py::arg("ranks") = std::vector<int>(), py::arg("least_seconds") = 0.0,
      "End what is under way under `name`, on all ranks, unless all of them have come, or this rank has waited in it\n"
      "for less than `least_seconds`. The error has this code and names these ranks.");
}

}  // namespace mykv
