// The path of x86-64 CPUs with AVX-512 F, BW, DQ and VL. Compiled with those instructions: see vector_elements.h.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define MYKV_VECTOR_BYTES 64
#include "kernels/loops.h"

namespace mykv {

const KernelPath* avx512_kernels() {
  static constexpr KernelPath kPath{"avx512", reduce_on_this_path, convert_on_this_path, squares_on_this_path};
  return &kPath;
}

}  // namespace mykv

#else
#include "kernels/instruction_set.h"

namespace mykv {

const KernelPath* avx512_kernels() { return nullptr; }

}  // namespace mykv
#endif
