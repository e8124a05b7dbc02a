#include "compress/compress_path.h"

#include <cstring>

#include "kernels/kernels.h"

namespace mykv::compress {

const CompressPath& compress_path() {
  for (const CompressPath* path : {avx512_loops(), avx2_loops()}) {
    if (path != nullptr && std::strcmp(path->name, kernel_path()) == 0) return *path;
  }
  return *generic_loops();
}

template <>
const Loops<float>& loops<float>() {
  return compress_path().floats;
}

template <>
const Loops<double>& loops<double>() {
  return compress_path().doubles;
}

}  // namespace mykv::compress
