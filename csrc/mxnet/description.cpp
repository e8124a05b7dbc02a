#include "mxnet/description.h"

#include <functional>
#include <numeric>

#include "base/error.h"
#include "operations/signature.h"

namespace mykv::mxnet {

namespace {

DType known_dtype(int number) {
  if (number < 0 || number >= kDTypeCount)
    throw Error("mykv does not know MXNet's type number " + std::to_string(number));
  return static_cast<DType>(number);
}

}  // namespace

size_t Description::count() const {
  return std::accumulate(shape.begin(), shape.end(), size_t{1}, std::multiplies<>());
}

size_t Description::row_elements() const {
  return std::accumulate(shape.begin() + 1, shape.end(), size_t{1}, std::multiplies<>());
}

std::string Description::text() const { return std::string(dtype_name(dtype)) + " " + shape_text(shape); }

Description describe(const Api& api, Handle array) {
  if (api.storage_type(array) != 0)
    throw Error("mykv takes dense arrays, and this array is sparse. Convert it with tostype('default') first");
  const Context context = api.context(array);
  const int type = context.device_type;
  if (type != kCpu && type != kCpuPinned && type != kCpuShared && type != kGpu)
    throw Error("mykv takes arrays in the memory of CPUs and GPUs only");
  return {known_dtype(api.dtype(array)), api.shape(array), type == kGpu ? context.device_id : -1};
}

}  // namespace mykv::mxnet
