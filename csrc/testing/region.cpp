// For tests: a region with a segment of its own.
#include "testing/region.h"

#include <sys/stat.h>

#include <memory>
#include <string>

#include "base/error.h"
#include "memory/region.h"

namespace py = pybind11;

namespace mykv {

namespace {

struct OwnRegion {
  OwnRegion(size_t bytes, bool keeps_memory)
      : segment(Segment::create(bytes, &refused)), region(segment, 0, bytes, keeps_memory) {}

  size_t taken() const {
    struct stat status{};
    if (fstat(segment.fd(), &status) != 0) throw Error("this system allows no segment");
    return static_cast<size_t>(status.st_blocks) * 512;
  }

  std::string refused;
  Segment segment;
  Region region;
};

}  // namespace

void bind_region(py::module_& m) {
  py::class_<OwnRegion>(m, "Region", py::buffer_protocol(),
                        "For tests: where a rank makes its slots, in memory of its own.")
      .def(py::init<size_t, bool>(), py::arg("nbytes"), py::arg("keeps_memory") = false)
      .def("allocate", [](OwnRegion& own, size_t bytes) { return own.region.allocate(bytes); })
      .def("reserve", [](OwnRegion& own, size_t bytes) { return own.region.reserve(bytes); })
      .def("release", [](OwnRegion& own, size_t offset, size_t bytes) { own.region.release(offset, bytes); })
      .def("release_reserved",
           [](OwnRegion& own, size_t offset, size_t bytes) { own.region.release_reserved(offset, bytes); })
      .def("taken", &OwnRegion::taken, "Bytes of memory behind it.")
      .def_buffer([](OwnRegion& own) {
        return py::buffer_info(own.segment.base(), 1, py::format_descriptor<uint8_t>::format(),
                               static_cast<py::ssize_t>(own.segment.bytes()));
      });
}

}  // namespace mykv
