#include "python/group_class.h"

#include <pybind11/stl.h>

#include "python/statistics.h"

namespace py = pybind11;

namespace mykv {

void bind_group(py::module_& m) {
  GroupClass group(
      m, "Group",
      "Ranks that work together, with a runtime and shared memory of their own. Its methods are those of the module,\n"
      "which act on the world; ranks and roots count within the group, messages call ranks by their labels.");
  bind_fact(m, group, "rank", [](const World& w) { return w.rank(); });
  bind_fact(m, group, "size", [](const World& w) { return w.size(); });
  bind_fact(m, group, "local_rank", [](const World& w) { return w.local_rank(); });
  bind_fact(m, group, "local_size", [](const World& w) { return w.local_size(); });
  bind_fact(m, group, "cross_rank", [](const World& w) { return w.cross_rank(); });
  bind_fact(m, group, "cross_size", [](const World& w) { return w.cross_size(); });
  bind_fact(m, group, "lonely", [](const World& w) { return w.lonely(); });
  bind_fact(m, group, "strangers", [](const World& w) { return w.strangers(); });
  bind_method(m, group, "agreement_traffic", &Group::agreement_traffic);
  bind_method(m, group, "exchange_traffic", &Group::exchange_traffic);
  bind_method(m, group, "gpu_road", &Group::gpu_road,
              "(whether some rank has a GPU, whether NCCL serves all ranks, why not).");
  bind_fact(m, group, "host_ranks", [](const World& w) { return w.hosts(); });
  group.def("abandon", &Group::abandon, py::arg("reason"), "Tell the other ranks that this one goes, and stop.");
  group.def("shutdown", [](Group& g) { g.abandon("it shut mykv down"); });
  bind_calls(m, group);
  bind_statistics(m, group);
  bind_method(m, group, "refuse", &Group::refuse, py::arg("name"), py::arg("reason"), py::arg("turn_of") = "");
  bind_method(
      m, group, "waiting", &Group::waiting, py::arg("name") = "", py::arg("least_seconds") = 0.0,
      "For whom operations under way wait: (name, seconds, ranks that have not come, ranks that do not respond),\n"
      "the longest wait first. Asks the other hosts.");
  bind_method(
      m, group, "waiting_for_this", &Group::waiting_for_this, py::arg("names"), py::arg("turn_of") = "",
      "For each name the ranks that have come to the operation which this rank will ask for next under it; with\n"
      "turn_of to the one that has the last turn under that name.");
  bind_method(m, group, "forget", &Group::forget, py::arg("prefix"),
              "Drop what is kept for names that begin with this, after the last call under them.");
  bind_method(
      m, group, "give_up", &Group::give_up, py::arg("name"), py::arg("reason"), py::arg("code") = "given_up",
      py::arg("ranks") = std::vector<int>(),
      "End what is under way under `name`, on all ranks, unless all of them have come. The error has this code\n"
      "and names these ranks.");
  bind_method(m, group, "reserve", &Group::reserve, py::arg("nbytes"));
  bind_method(m, group, "allocate", &Group::allocate, py::arg("nbytes"));
}

}  // namespace mykv
