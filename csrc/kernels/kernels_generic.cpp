// The path of every CPU: 16-byte vectors, which the compiler maps to SSE2 on x86-64 and to NEON on aarch64.
#define MYKV_VECTOR_BYTES 16
#include "kernels/loops.h"

namespace mykv {

const KernelPath* generic_kernels() {
  static constexpr KernelPath kPath{"generic", reduce_on_this_path, convert_on_this_path, squares_on_this_path};
  return &kPath;
}

}  // namespace mykv
