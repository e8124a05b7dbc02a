// The path of x86-64 CPUs with AVX2 and F16C. Compiled with those instructions: see vector_elements.h for the rules.
#if defined(__AVX2__) && defined(__F16C__)
#define MYKV_VECTOR_BYTES 32
#include "kernels/loops.h"

namespace mykv {

const KernelPath* avx2_kernels() {
  static constexpr KernelPath kPath{"avx2", reduce_on_this_path, convert_on_this_path, squares_on_this_path};
  return &kPath;
}

}  // namespace mykv

#else
#include "kernels/instruction_set.h"

namespace mykv {

const KernelPath* avx2_kernels() { return nullptr; }

}  // namespace mykv
#endif
