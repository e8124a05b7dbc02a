// Sizes and names of element types and operators: one table each, indexed by MXNet's numbers.
#include "kernels/dtype.h"

#include <array>

namespace mykv {
namespace {

struct TypeRow {
  const char* name;
  size_t size;
};

constexpr std::array<TypeRow, kDTypeCount> kTypes{{{"float32", 4},
                                                   {"float64", 8},
                                                   {"float16", 2},
                                                   {"uint8", 1},
                                                   {"int32", 4},
                                                   {"int8", 1},
                                                   {"int64", 8},
                                                   {"bool", 1},
                                                   {"int16", 2},
                                                   {"uint16", 2},
                                                   {"uint32", 4},
                                                   {"uint64", 8},
                                                   {"bfloat16", 2}}};

constexpr std::array<const char*, kReduceOpCount> kOps{"sum", "min", "max", "product"};

}  // namespace

size_t item_size(DType dtype) { return kTypes[static_cast<size_t>(dtype)].size; }

const char* dtype_name(DType dtype) { return kTypes[static_cast<size_t>(dtype)].name; }

bool dtype_from_name(std::string_view name, DType* dtype) {
  for (size_t i = 0; i < kTypes.size(); ++i) {
    if (name == kTypes[i].name) {
      *dtype = static_cast<DType>(i);
      return true;
    }
  }
  return false;
}

const char* reduce_op_name(ReduceOp op) { return kOps[static_cast<size_t>(op)]; }

bool reduce_op_from_name(std::string_view name, ReduceOp* op) {
  for (size_t i = 0; i < kOps.size(); ++i) {
    if (name == kOps[i]) {
      *op = static_cast<ReduceOp>(i);
      return true;
    }
  }
  return false;
}

}  // namespace mykv
