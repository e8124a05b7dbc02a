// The path of x86-64 CPUs with AVX2. Compiled with those instructions: see loops/bits.h for the rules.
#if defined(__AVX2__) && defined(__F16C__)
#include "compress/loops/all.h"

namespace mykv::compress {

const CompressPath* avx2_loops() {
  static constexpr CompressPath kPath{"avx2", kLoops<float>, kLoops<double>, collect_draws};
  return &kPath;
}

}  // namespace mykv::compress

#else
#include "compress/compress_path.h"

namespace mykv::compress {

const CompressPath* avx2_loops() { return nullptr; }

}  // namespace mykv::compress
#endif
