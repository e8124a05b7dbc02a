// NCCL's numbers, and arithmetic on its dtypes.
#pragma once

#include <cstddef>
#include <vector>

namespace standin {

enum Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

enum Type : int { kInt8, kUint8, kInt32, kUint32, kInt64, kUint64, kFloat16, kFloat32, kFloat64, kBfloat16, kTypes };

enum Op : int { kSum, kProd, kMax, kMin, kAvg, kPreMulSum };

struct Reduction {
  Op op = kSum;
  double scalar = 1;                // this rank's, for kPreMulSum
  const void* on_device = nullptr;  // where it is to be read when the operation runs
  Type scalar_type = kFloat32;
};

size_t size_of(Type type);
double read_scalar(const void* from, Type type);

// Reduce `count` elements of all ranks, in rank order, float16 and bfloat16 in float32; `scalars` are for kPreMulSum.
void reduce(Type type, Op op, const std::vector<const void*>& sources, const std::vector<double>& scalars, void* result,
            size_t count);

}  // namespace standin
