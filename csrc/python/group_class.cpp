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
  bind_fact(m, group, "why_memory_is_not_shared", [](const World& w) { return w.why_memory_is_not_shared(); });
  bind_fact(m, group, "rejected_callers", [](const World& w) { return w.rejected_callers(); });
  bind_method(m, group, "agreement_traffic", &Group::agreement_traffic);
  bind_method(m, group, "exchange_traffic", &Group::exchange_traffic);
  bind_method(
      m, group, "gpu_road", &Group::gpu_road,
      "(whether some rank has a GPU, whether NCCL serves all ranks, why not, whether MYKV_GPU chose host memory).");
  bind_fact(m, group, "host_ranks", [](const World& w) { return w.hosts(); });
  group.def("leave", &Group::leave, py::arg("reason"), "Tell the other ranks that this rank leaves, and stop.");
  group.def("shutdown", [](Group& g) { g.leave({"it shut mykv down"}); });
  bind_submits(m, group);
  bind_memory(m, group);
  bind_pushes(m, group);
  bind_pieces(m, group);
  bind_waits(m, group);
  bind_statistics(m, group);
}

}  // namespace mykv
