// What one instruction set's file offers to the dispatcher. Only plain data and function pointers: those files are
// compiled with instructions this CPU may lack, so nothing inline may be shared with them.
#pragma once

#include "kernels/dtype.h"

namespace mykv {

// The arguments of reduce() and copy(), checked and with the trivial cases gone.
struct ReduceCall {
  DType dtype;
  ReduceOp op;
  const char* const* inputs;
  int n_inputs;
  char* const* outputs;
  int n_outputs;
  size_t bytes;  // of each array
  double scale;
  bool streaming;
};

// One of the types is float32, the other one float16 or bfloat16.
struct ConvertCall {
  DType to;
  DType from;
  char* dst;
  const char* src;
  size_t count;
};

struct KernelPath {
  const char* name;
  void (*reduce)(const ReduceCall& call);
  void (*copy_streaming)(char* dst, const char* src, size_t bytes);
  void (*convert)(const ConvertCall& call);
};

// Null where the build lacks the instruction set.
const KernelPath* generic_kernels();
const KernelPath* avx2_kernels();
const KernelPath* avx512_kernels();

}  // namespace mykv
