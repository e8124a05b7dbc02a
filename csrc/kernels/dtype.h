// Element types and reduction operators, and their names. They carry MXNet's numbers so that no layer needs a
// translation table, but nothing here needs MXNet.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace mykv {

// MXNet's type numbers (mshadow/base.h).
enum class DType : uint8_t {
  float32 = 0,
  float64 = 1,
  float16 = 2,
  uint8 = 3,
  int32 = 4,
  int8 = 5,
  int64 = 6,
  bool8 = 7,
  int16 = 8,
  uint16 = 9,
  uint32 = 10,
  uint64 = 11,
  bfloat16 = 12,
};
constexpr int kDTypeCount = 13;

// Bytes of one element.
size_t item_size(DType dtype);

// NumPy's name of the type: 'float32', ..., 'bool'; and 'bfloat16'.
const char* dtype_name(DType dtype);

// Finds the type of that name; false, and *dtype unchanged, if there is none.
bool dtype_from_name(std::string_view name, DType* dtype);

enum class ReduceOp : uint8_t { sum = 0, min, max, product };
constexpr int kReduceOpCount = 4;

// 'sum', 'min', 'max', 'product'.
const char* reduce_op_name(ReduceOp op);

// Finds the operator of that name; false, and *op unchanged, if there is none.
bool reduce_op_from_name(std::string_view name, ReduceOp* op);

}  // namespace mykv
