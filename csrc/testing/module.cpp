// The extension module for tests, _core_testing: parts of the core as functions, and access to the loaded core
// (live.cpp). It is linked from the same object files, and is never installed.
#include <mpi.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/stat.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "agreement/inbox.h"
#include "base/error.h"
#include "gpu/device.h"
#include "gpu/libraries.h"
#include "kernels/kernels.h"
#include "memory/headroom.h"
#include "memory/region.h"
#include "python/arguments.h"
#include "python/without_gil.h"
#include "runtime/requests.h"
#include "runtime/spin_policy.h"
#include "testing/bindings.h"
#include "testing/parsers.h"
#include "transport/mpi/slice_exchange.h"

namespace py = pybind11;

namespace mykv {

namespace {

// For tests: a region with a segment of its own.

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
                        "For tests: the region in which a rank allocates its slots, in its own memory.")
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

namespace {

void bind_parsers(py::module_& m) {
  m.def("parsers", [] {
    std::vector<std::string> names;
    for (const auto& [name, parser] : testing::parsers()) names.push_back(name);
    return names;
  });
  m.def(
      "parse",
      [](const std::string& parser, const std::string& bytes) {
        testing::parsers().at(parser)(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
      },
      py::arg("parser"), py::arg("bytes"), "Give bytes to one of parsers(), which must not crash.");
}

// For each row: the host that reduces each column.
std::vector<std::vector<size_t>> square_grid(size_t hosts) {
  const HostGrid grid = HostGrid::square(hosts);
  std::vector<std::vector<size_t>> rows(grid.rows());
  for (size_t row = 0; row < grid.rows(); ++row) {
    for (size_t column = 0; column < grid.columns(); ++column) rows[row].push_back(grid.host(row, column));
  }
  return rows;
}

// A request has `parts` parts. The first parts end in order, with these errors (empty: success). Returns the index of
// the part that ends the request, or -1 if the request goes on. `agreed`: all ranks have entered the first part.
int last_part(size_t parts, const std::vector<std::string>& errors, bool agreed) {
  Requests requests(size_t{1} << 19, size_t{1} << 20);
  const auto posted = std::make_shared<RequestState>();
  posted->parts = parts;
  for (size_t number = 0; number < errors.size(); ++number) {
    Part part;
    part.posted = posted;
    part.number = number;
    part.entry = static_cast<uint32_t>(number);
    requests.add(part);
    bool first = false;
    if (agreed) requests.begin(part.entry, 0, &first);
    if (requests.finish(*requests.take(part.entry), Failure(errors[number]), 0)) return static_cast<int>(number);
  }
  return -1;
}

void bind_inbox(py::module_& m) {
  py::class_<Inbox>(m, "Inbox", "The core's receiver for messages of other hosts.")
      .def(py::init([](int comm, int tag) { return std::make_unique<Inbox>(MPI_Comm_f2c(comm), tag); }))
      .def("take", [](Inbox& inbox) -> std::optional<std::pair<py::bytes, int>> {
        std::vector<char> bytes;
        int from = 0;
        if (!inbox.take(&bytes, &from)) return std::nullopt;
        return std::make_pair(py::bytes(bytes.data(), bytes.size()), from);
      });
}

}  // namespace
}  // namespace mykv

PYBIND11_MODULE(_core_testing, m) {
  using namespace mykv;
  m.doc() = "For tests: parts of the compiled core as functions, and hooks into the core that is loaded.";
  bind_live(m);  // imports the core, whose errors the functions below raise
  bind_parsers(m);
  bind_inbox(m);
  bind_compressor(m);
  bind_region(m);
  bind_door(m);
  m.def("last_part", &last_part, py::arg("parts"), py::arg("errors"), py::arg("agreed"));
  m.def(
      "memory_headroom",
      [](const std::string& proc) {
        const Headroom now = HeadroomWatch(proc).look();
        return std::make_pair(now.bytes, now.what);
      },
      py::arg("proc") = "/proc", "Bytes of memory that may still be taken, and the limit.");
  m.def("square_grid", &square_grid, py::arg("hosts"),
        "The grid in which `hosts` hosts exchange: for each row, the host that reduces each column.");
  m.def(
      "sum_of_squares",
      [](const std::string& dtype, const py::array& values) {
        return sum_of_squares(dtype_named(dtype), values.data(), static_cast<size_t>(values.size()));
      },
      py::arg("dtype"), py::arg("values"));
  m.def(
      "standstill_after",
      [](double moving, double standing) {
        Standstill standstill;
        std::this_thread::sleep_for(std::chrono::duration<double>(moving));
        standstill.end();
        std::this_thread::sleep_for(std::chrono::duration<double>(standing));
        return std::chrono::duration<double>(standstill.look()).count();
      },
      py::arg("moving"), py::arg("standing"), "Standstill that counts after these seconds.");
  m.def(
      "load_cuda", [](const std::vector<std::string>& cuda) { return gpu::Libraries::load(cuda, {}).cuda_problem(); },
      py::arg("cuda"), "Load the CUDA runtime into this module, of which gpu_events() are.");
  m.def(
      "gpu_events",
      [](int count) {
        for (int k = 0; k < count; ++k) gpu::Event::record(0, nullptr);
      },
      py::arg("count"), py::call_guard<WithoutGil>(), "Create and drop `count` events of GPU 0.");
  py::class_<gpu::Event, std::shared_ptr<gpu::Event>>(m, "GpuEvent").def(py::init([] {
    return std::const_pointer_cast<gpu::Event>(gpu::Event::record(0, nullptr));
  }));
  m.def(
      "call_later",
      [](uintptr_t function, uintptr_t argument, int ms) {
        std::thread([=]() noexcept {
          std::this_thread::sleep_for(std::chrono::milliseconds(ms));
          reinterpret_cast<void (*)(void*)>(function)(reinterpret_cast<void*>(argument));
        }).detach();
      },
      py::arg("function"), py::arg("argument"), py::arg("ms"),
      "A thread that Python does not know calls a function, as threads of MXNet's engine call deleters.");
  m.def("kernel_path", &kernel_path, "The instruction set of this module's kernels (compressors, sum_of_squares).");
  m.def("select_kernel_path", &select_kernel_path, py::arg("name"));
}
