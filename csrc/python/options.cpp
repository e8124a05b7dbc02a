#include "python/options.h"

#include <algorithm>
#include <cstdint>
#include <string>

namespace py = pybind11;

namespace mykv {

RuntimeOptions options_from(const py::dict& given) {
  RuntimeOptions options;
  for (const auto& item : given) {
    const auto key = py::cast<std::string>(item.first);
    if (key == "virtual_hosts") {
      options.world.virtual_hosts = py::cast<int>(item.second);
    } else if (key == "part_bytes") {
      options.part_bytes = py::cast<size_t>(item.second);
    } else if (key == "table_capacity") {
      options.world.table_capacity = std::max<size_t>(py::cast<size_t>(item.second), 1);
    } else if (key == "staging_bytes") {
      options.staging_bytes = py::cast<size_t>(item.second);
    } else if (key == "versions") {
      for (const auto& [name, version] : py::cast<py::dict>(item.second))
        options.world.versions.emplace_back(py::cast<std::string>(name), py::cast<std::string>(version));
    } else if (key == "network_bytes") {
      options.network.bytes = py::cast<size_t>(item.second);
    } else if (key == "fan_out") {
      options.network.fan_out = std::max<size_t>(py::cast<size_t>(item.second), 1);
    } else if (key == "exchange") {
      const auto way = py::cast<std::string>(item.second);
      if (way == "direct") options.network.most_in_a_row = UINT32_MAX;
      if (way == "grid") options.network.most_in_a_row = 0;
    } else if (key == "compress_bytes") {
      options.compress_bytes = py::cast<size_t>(item.second);
    } else if (key == "stall_abort_ms") {
      options.stall_abort_ms = py::cast<size_t>(item.second);
    } else if (key == "gpu") {
      options.gpu.road = py::cast<std::string>(item.second);
    } else {
      throw py::value_error("mykv_core.init() has no option '" + key + "'");
    }
  }
  return options;
}

}  // namespace mykv
