// The interface between the dispatcher and the files that are compiled for one instruction set each. It has only plain
// data and function pointers: such a file has instructions that this CPU may lack, so it must not share inline code
// with other files.
#pragma once

#include "kernels/dtype.h"

namespace mykv {

// The arguments of reduce(). The dispatcher has checked them, and handles the trivial cases itself.
struct ReduceCall {
  DType dtype;
  ReduceOp op;
  const char* const* inputs;
  int n_inputs;
  char* const* outputs;
  int n_outputs;
  size_t bytes;  // bytes of each array
  double scale;
};

// One of the types is float32, the other type float16 or bfloat16.
struct ConvertCall {
  DType to;
  DType from;
  char* dst;
  const char* src;
  size_t count;
};

// Values of float32 or float64.
struct SquaresCall {
  DType dtype;
  const char* values;
  size_t count;
};

struct KernelPath {
  const char* name;
  void (*reduce)(const ReduceCall& call);
  void (*convert)(const ConvertCall& call);
  double (*squares)(const SquaresCall& call);  // the sum of the squares
};

// The path that was chosen: see select_kernel_path.
const KernelPath& kernels_in_use();

// Null if the build lacks the instruction set.
const KernelPath* generic_kernels();
const KernelPath* avx2_kernels();
const KernelPath* avx512_kernels();

}  // namespace mykv
