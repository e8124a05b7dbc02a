// The path of x86-64 CPUs with AVX-512. Compiled with those instructions: see loops/bits.h for the rules.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "compress/loops/all.h"

namespace mykv::compress {

const CompressPath* avx512_loops() {
  static constexpr CompressPath kPath{"avx512", kLoops<float>, kLoops<double>, collect_draws};
  return &kPath;
}

}  // namespace mykv::compress

#else
#include "compress/compress_path.h"

namespace mykv::compress {

const CompressPath* avx512_loops() { return nullptr; }

}  // namespace mykv::compress
#endif
