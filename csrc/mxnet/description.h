// Dtype, shape and device of an MXNet array.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "kernels/dtype.h"
#include "mxnet/api.h"

namespace mykv::mxnet {

struct Description {
  DType dtype;
  std::vector<size_t> shape;
  int gpu = -1;  // -1: in host memory

  size_t count() const;
  size_t row_elements() const;
  std::string text() const;
};

// Throws Error if the array is sparse, on another kind of device, or of an unknown dtype.
Description describe(const Api& api, Handle array);

}  // namespace mykv::mxnet
