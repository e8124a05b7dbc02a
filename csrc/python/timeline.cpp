#include "timeline/timeline.h"

#include <fcntl.h>

#include <string>

#include "base/file_descriptor.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace mykv {

namespace {

int start_timeline(int fd, int rank, bool mark_cycles, int64_t zero_ns, const std::string& members) {
  FileDescriptor file(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!file) return errno;
  py::gil_scoped_release release;
  return Timeline::instance().start(std::move(file), {mark_cycles, rank, zero_ns, members});
}

}  // namespace

void bind_timeline(py::module_& m) {
  m.def("start_timeline", &start_timeline, py::arg("fd"), py::arg("rank"), py::arg("mark_cycles"), py::arg("zero_ns"),
        py::arg("members"),
        "Record into the empty regular file behind `fd`, which stays the caller's. Times count from `zero_ns`\n"
        "(time.monotonic_ns). `members`: JSON, of the outer object. Returns 0, or the errno of a failed write.");
  m.def(
      "stop_timeline", [] { return Timeline::instance().stop(); }, py::call_guard<py::gil_scoped_release>(),
      "Write what is left and end. Returns 0, or the errno of the write that ended it before.");
}

}  // namespace mykv
