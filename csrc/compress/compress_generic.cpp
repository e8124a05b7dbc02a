// The path of every CPU: SSE2 on x86-64, NEON on aarch64.
#include "compress/loops/all.h"

namespace mykv::compress {

const CompressPath* generic_loops() {
  static constexpr CompressPath kPath{"generic", kLoops<float>, kLoops<double>, collect_draws};
  return &kPath;
}

}  // namespace mykv::compress
