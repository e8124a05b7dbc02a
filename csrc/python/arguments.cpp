#include "python/arguments.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>

#include "compress/compressor.h"
#include "mxnet/bridge.h"

namespace py = pybind11;

namespace mykv {

namespace {

py::object* g_error_type = new py::object;    // kvstore_plugin._core.Error
py::object* g_failure_type = new py::object;  // MXNetError

// The attributes are in the exception's __dict__, which pickle keeps.
void raise(const py::object& type, const Error& error) {
  const std::string& text = error.failure().text;
  // A text that was cut may end within a character.
  const auto message = py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<py::ssize_t>(text.size()), "replace"));
  const py::object raised = type(message);
  raised.attr("code") = name_of(error.failure().code);
  raised.attr("ranks") = py::tuple(py::cast(error.failure().ranks));
  if (dynamic_cast<const AgreedError*>(&error) != nullptr) raised.attr("agreed") = true;
  PyErr_SetObject(type.ptr(), raised.ptr());
}

}  // namespace

void bind_errors(py::module_& m) {
  *g_error_type = py::exception<Error>(m, "Error", PyExc_RuntimeError);
  g_error_type->attr("__doc__") =
      "Why the core cannot do something. `code` (str) says what kind of end it was, `ranks` (tuple of int) which ranks "
      "it names; docs/errors.md lists the codes. `agreed` (bool): all ranks that met in the call raise the error.";
  g_error_type->attr("code") = name_of(ErrorCode::other);
  g_error_type->attr("ranks") = py::tuple();
  g_error_type->attr("agreed") = false;
  py::list codes;
  for (const char* code : kErrorCodes) codes.append(code);
  g_error_type->attr("codes") = py::tuple(codes);
  *g_failure_type = py::none();
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const mxnet::FailedOperation& error) {
      raise(g_failure_type->is_none() ? py::reinterpret_borrow<py::object>(PyExc_RuntimeError) : *g_failure_type,
            error);
    } catch (const Error& error) {
      raise(*g_error_type, error);
    }
  });
}

void set_failure_type(const py::object& type) { *g_failure_type = type; }

ErrorCode error_code_of(const std::string& name) {
  const auto* const found = std::find(std::begin(kErrorCodes), std::end(kErrorCodes), name);
  if (found == std::end(kErrorCodes)) throw py::value_error("there is no error code '" + name + "'");
  return static_cast<ErrorCode>(found - std::begin(kErrorCodes));
}

DType dtype_named(const std::string& name) {
  DType dtype;
  if (!dtype_from_name(name, &dtype)) throw py::value_error("mykv does not know the dtype '" + name + "'");
  return dtype;
}

Operation allreduce_operation(const Runtime& runtime, const std::string& op, double scale, int priority,
                              const std::string& wire) {
  Operation operation;
  operation.kind = Kind::allreduce;
  if (!reduce_op_from_name(op, &operation.reduce_op)) throw py::value_error("mykv has no operation '" + op + "'");
  operation.scale = scale;
  operation.priority = priority;
  DType dtype;
  if (wire.empty()) return operation;
  if (dtype_from_name(wire, &dtype)) {
    operation.wire = dtype;
    if (dtype != DType::float16 && dtype != DType::bfloat16) {
      throw py::value_error("values travel as float16 or bfloat16, not as " + wire);
    }
    return operation;
  }
  if (operation.reduce_op != ReduceOp::sum) throw py::value_error("only sums can be compressed, not a " + op);
  operation.compressor = &compress::compressor_of(wire);
  operation.compress_from = runtime.options().compress_bytes;
  return operation;
}

std::vector<mxnet::Handle> handles(const Handles& numbers) {
  std::vector<mxnet::Handle> result;
  result.reserve(numbers.size());
  for (uintptr_t number : numbers) result.push_back(reinterpret_cast<mxnet::Handle>(number));
  return result;
}

mxnet::Handle handle(uintptr_t number) { return reinterpret_cast<mxnet::Handle>(number); }

std::shared_ptr<const std::vector<Shard>> shards_of(const BucketShards& division, size_t elements, const World& world) {
  auto shards = std::make_shared<std::vector<Shard>>();
  size_t end = 0;
  for (const auto& [at, count, root] : division) {
    if (at != end || count > elements - end || root < 0 || root >= world.size())
      throw py::value_error("shards must cover all elements of the operation in order, and their owners must be ranks");
    shards->push_back({at, count, root});
    end += count;
  }
  if (end != elements) throw py::value_error("shards must cover all elements of the operation");
  return shards;
}

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
      throw py::value_error("init() of the core has no option '" + key + "'");
    }
  }
  return options;
}

}  // namespace mykv
