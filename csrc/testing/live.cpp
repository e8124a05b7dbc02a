#include <dlfcn.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/planted_faults.h"
#include "python/group.h"
#include "python/without_gil.h"
#include "testing/bindings.h"

namespace py = pybind11;

// A digest of csrc/ that the build adds to both modules (CMakeLists.txt).
extern "C" const char mykv_sources[];

namespace mykv {

namespace testing {

struct RuntimeAccess {
  static void signal_under_lock(Runtime& runtime, int number) {
    runtime.context_.table.lock().run([&] { kill(getpid(), number); });
  }
  static void signal_with_launch_order(Runtime& runtime, int number) {
    LaunchOrder& order = LaunchOrder::in(runtime.context_.table);
    if (!order.lock(1000000, runtime.context_.label())) throw Error("the order of launches is locked");
    kill(getpid(), number);
    order.unlock();
  }
  static uint32_t bell_rings(Runtime& runtime) { return runtime.context_.bell().count(); }
  static std::vector<uint32_t> entries_ahead(Runtime& runtime) {
    HostTable& table = runtime.context_.table;
    return table.lock().run([&] {
      std::vector<uint32_t> ahead;
      for (int r = 0; r < table.local_size(); ++r) ahead.push_back(table.bells_[r].ahead);
      return ahead;
    });
  }
};

}  // namespace testing

namespace {

// A symbol of the core that is loaded.
void* symbol_of(const py::object& core, const char* name) {
  const auto file = py::cast<std::string>(core.attr("__file__"));
  void* const handle = dlopen(file.c_str(), RTLD_NOW | RTLD_NOLOAD);
  void* const found = handle == nullptr ? nullptr : dlsym(handle, name);
  if (found == nullptr) throw py::import_error(file + " has no " + name);
  return found;
}

}  // namespace

void bind_live(py::module_& m) {
  // Not by an import, which would import the package first, and with it MXNet.
  const py::object core = py::module_::import("sys").attr("modules")["kvstore_plugin._core"];
  if (std::strcmp(static_cast<const char*>(symbol_of(core, "mykv_sources")), mykv_sources) != 0) {
    throw py::import_error("_core_testing and " + py::cast<std::string>(core.attr("__file__")) +
                           " were built from different sources. Build both again: the core as usual, then `python "
                           "setup.py build_testing`.");
  }
  auto* const planted = static_cast<std::atomic<int64_t>*>(symbol_of(core, "mykv_planted_faults"));
  m.def(
      "plant",
      [planted](const std::string& fault, int64_t count) {
        const auto* const found = std::find(std::begin(testing::kFaults), std::end(testing::kFaults), fault);
        if (found == std::end(testing::kFaults)) throw py::value_error("there is no fault '" + fault + "'");
        planted[found - std::begin(testing::kFaults)].store(count);
      },
      py::arg("fault"), py::arg("count"),
      "Let the count-th opportunity from now on (of entries: each of `count`) be a fault, one of "
      "csrc/base/planted_faults.h; 0: none.");
  m.def(
      "signal_under_lock",
      [](const std::shared_ptr<Group>& group, int number) {
        const std::shared_ptr<Runtime> kept = group->runtime();
        WithoutGil release;
        testing::RuntimeAccess::signal_under_lock(*kept, number);
      },
      py::arg("group"), py::arg("number"),
      "Send this process a signal while it keeps the table of its host locked. `group`: such as core.world().");
  m.def(
      "signal_with_launch_order",
      [](const std::shared_ptr<Group>& group, int number) {
        const std::shared_ptr<Runtime> kept = group->runtime();
        WithoutGil release;
        testing::RuntimeAccess::signal_with_launch_order(*kept, number);
      },
      py::arg("group"), py::arg("number"), "The same while it keeps the order of launches on GPUs locked.");
  m.def(
      "bell_rings",
      [](const std::shared_ptr<Group>& group) { return testing::RuntimeAccess::bell_rings(*group->runtime()); },
      py::arg("group"), "The number of rings of this rank's bell.");
  m.def(
      "entries_ahead",
      [](const std::shared_ptr<Group>& group) { return testing::RuntimeAccess::entries_ahead(*group->runtime()); },
      py::arg("group"), "For each rank of this host: the entries of the table that it has made before they were due.");
  m.def(
      "counted_names", [](const std::shared_ptr<Group>& group) { return group->runtime()->counted_names(); },
      py::arg("group"), "The number of names whose calls are counted.");
}

}  // namespace mykv
