#include "python/arguments.h"

#include <pybind11/pybind11.h>

#include "compress/compressor.h"

namespace py = pybind11;

namespace mykv {

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
      throw py::value_error("shards must be all elements of the operation in their order, and their owners ranks");
    shards->push_back({at, count, root});
    end += count;
  }
  if (end != elements) throw py::value_error("shards must be all elements of the operation");
  return shards;
}

}  // namespace mykv
