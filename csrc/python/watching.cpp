#include <fcntl.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/file_descriptor.h"
#include "base/forks.h"
#include "python/bindings.h"
#include "python/group.h"
#include "python/without_gil.h"
#include "runtime/stall_watch.h"
#include "timeline/timeline.h"

namespace py = pybind11;

namespace mykv {

namespace {

struct Watching {
  std::mutex mutex;
  std::condition_variable ended;
  bool on = false;
  uint32_t forks =
      fork_number();  // of the watching process: a fork has no watching thread, and the mutex may be locked forever
  std::map<std::weak_ptr<Runtime>, StallWatch, std::owner_less<>> of;  // used by the watching thread only
};
Watching* g_watching = new Watching;

bool watches_elsewhere() { return g_watching->forks != fork_number(); }

// The time between two checks: short enough for the shorter limit, and to notice that this process itself was stopped.
std::chrono::duration<double> look_every(const StallLimits& limits) {
  double seconds = 1;
  for (double limit : {limits.warn_seconds, limits.abort_seconds}) {
    if (limit > 0) seconds = std::min(seconds, limit / 8);
  }
  return std::chrono::duration<double>(std::max(seconds, 0.01));
}

std::vector<std::pair<bool, std::string>> look_at_all(const StallLimits& limits, double stopped) {
  std::vector<std::pair<bool, std::string>> reports;
  for (const std::weak_ptr<Runtime>& one : runtimes()) {
    const std::shared_ptr<Runtime> runtime = one.lock();
    if (!runtime) continue;
    if (std::string note = runtime->take_gpu_note(); !note.empty()) reports.emplace_back(false, std::move(note));
    for (StallReport& report : g_watching->of[one].look(*runtime, limits, stopped)) {
      reports.emplace_back(report.over, std::move(report.text));
    }
  }
  for (auto it = g_watching->of.begin(); it != g_watching->of.end();) {
    it = it->first.expired() ? g_watching->of.erase(it) : std::next(it);
  }
  return reports;
}

// Waits until a group stalls or recovers: (whether it recovered, the message) for each report. None after
// end_stall_watch(), or if both limits are 0. For one thread of Python.
std::optional<std::vector<std::pair<bool, std::string>>> next_stalls(double warn_seconds, double abort_seconds) {
  if (watches_elsewhere()) return std::nullopt;
  const StallLimits limits{warn_seconds, abort_seconds};
  const auto interval = look_every(limits);
  WithoutGil release;
  std::unique_lock<std::mutex> lock(g_watching->mutex);
  std::chrono::duration<double> stopped{};
  while (g_watching->on) {
    const auto before = std::chrono::steady_clock::now();
    if (g_watching->ended.wait_for(lock, interval, [] { return !g_watching->on; })) break;
    // This process was stopped, and perhaps other processes too: gives all of them time for a step.
    const auto lasted = std::chrono::steady_clock::now() - before;
    if (lasted > 2 * interval + std::chrono::milliseconds(500)) {
      stopped += lasted - interval;
      continue;
    }
    lock.unlock();
    std::vector<std::pair<bool, std::string>> reports =
        look_at_all(limits, std::exchange(stopped, std::chrono::duration<double>{}).count());
    if (!reports.empty()) return reports;
    lock.lock();
  }
  return std::nullopt;
}

void begin_stall_watch() {
  if (watches_elsewhere()) g_watching = new Watching;  // this process is a fork that has created its own world
  std::lock_guard<std::mutex> lock(g_watching->mutex);
  g_watching->on = true;
}

void end_stall_watch() {
  if (watches_elsewhere()) return;
  std::lock_guard<std::mutex> lock(g_watching->mutex);
  g_watching->on = false;
  g_watching->ended.notify_all();
}

}  // namespace

void bind_stall_watch(py::module_& m) {
  m.def("begin_stall_watch", &begin_stall_watch);
  m.def("end_stall_watch", &end_stall_watch, "Make next_stalls() return None.");
  m.def("next_stalls", &next_stalls, py::arg("warn_seconds"), py::arg("abort_seconds"),
        "Wait until operations of this process stall or recover: a list of (whether they recovered, message).");
}

namespace {

int start_timeline(int fd, const std::string& about, bool mark_cycles) {
  FileDescriptor file(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!file) return errno;
  WithoutGil release;
  return Timeline::instance().start(std::move(file), about, mark_cycles);
}

}  // namespace

void bind_timeline(py::module_& m) {
  m.def("start_timeline", &start_timeline, py::arg("fd"), py::arg("about"), py::arg("mark_cycles"),
        "Record into the empty regular file behind `fd`, which stays the caller's. `about`: the file's first line.\n"
        "Times are those of time.monotonic_ns. Returns 0, or the errno of a failed write.");
  m.def(
      "stop_timeline", [] { return Timeline::instance().stop(); }, py::call_guard<WithoutGil>(),
      "Write the remaining records and end. Returns 0, or the errno of the write that ended it earlier.");
}

}  // namespace mykv
