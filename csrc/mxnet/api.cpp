#include "mxnet/api.h"

#include <dlfcn.h>

#include "base/error.h"

namespace mykv::mxnet {

namespace {

template <class Function>
void find(void* library, const char* symbol, Function** function) {
  *function = reinterpret_cast<Function*>(dlsym(library, symbol));
  if (*function == nullptr) {
    throw Error(std::string("the loaded MXNet library has no ") + symbol + "; mykv knows MXNet 1.9 and 2.0");
  }
}

template <class Function>
void find_optional(void* library, const char* symbol, Function** function) {
  if (*function == nullptr) *function = reinterpret_cast<Function*>(dlsym(library, symbol));
}

}  // namespace

Api::Api(void* library, int major) : major_(major) {
  find(library, "MXEnginePushAsyncND", &push_);
  find(library, "MXNDArrayDetach", &detach_);
  find(library, "MXNDArrayFree", &free_);
  find(library, "MXNDArrayGetData", &get_data_);
  find(library, major == 1 ? "MXNDArrayGetShapeEx64" : "MXNDArrayGetShape64", &get_shape_);
  find(library, "MXNDArrayGetDType", &get_dtype_);
  find(library, "MXNDArrayGetStorageType", &get_storage_type_);
  find(library, "MXNDArrayGetContext", &get_context_);
  find(library, "MXGetLastError", &get_error_);
  find_optional(library, "_ZNK5mxnet7NDArray5Chunk8IsMKLDNNEv", &is_blocked_);
  find_optional(library, "_ZNK5mxnet7NDArray5Chunk6IsDNNLEv", &is_blocked_);
  find_optional(library, "_ZN5mxnet7NDArray5Chunk15Reorder2DefaultEv", &reorder_);
}

void Api::fail(const char* what) const { throw Error(std::string(what) + ": " + get_error_()); }

Handle Api::retain(Handle array) const {
  Handle copy = nullptr;
  if (detach_(array, &copy) != 0) fail("MXNDArrayDetach");
  return copy;
}

void Api::release(Handle array) const { free_(array); }

void* Api::data(Handle array) const {
  // If the array is in oneDNN's blocked layout, MXNDArrayGetData would wait for the engine: a deadlock in an engine
  // thread. So the layout is changed first.
  void* chunk = const_cast<void*>(storage(array));
  if (is_blocked_ != nullptr && reorder_ != nullptr && is_blocked_(chunk)) reorder_(chunk);
  void* data = nullptr;
  if (get_data_(array, &data) != 0) fail("MXNDArrayGetData");
  return data;
}

int Api::dtype(Handle array) const {
  int dtype = -1;
  if (get_dtype_(array, &dtype) != 0) fail("MXNDArrayGetDType");
  return dtype;
}

int Api::storage_type(Handle array) const {
  int type = 0;
  if (get_storage_type_(array, &type) != 0) fail("MXNDArrayGetStorageType");
  return type;
}

Context Api::context(Handle array) const {
  Context context{};
  if (get_context_(array, &context.device_type, &context.device_id) != 0) fail("MXNDArrayGetContext");
  return context;
}

std::vector<size_t> Api::shape(Handle array) const {
  int dimensions = 0;
  const int64_t* sizes = nullptr;
  if (get_shape_(array, &dimensions, &sizes) != 0) fail("MXNDArrayGetShape");
  std::vector<size_t> shape;
  for (int d = 0; d < dimensions; ++d) {
    if (sizes[d] < 0) throw Error("the array's shape is not known yet");
    shape.push_back(static_cast<size_t>(sizes[d]));
  }
  return shape;
}

void Api::push(void* function, void* parameter, void (*deleter)(void*), const std::vector<Handle>& reads,
               const std::vector<Handle>& writes, int property, int priority, const char* name, bool always) const {
  Context context{kCpu, 0};
  if (push_(function, parameter, deleter, &context, reads.data(), static_cast<int>(reads.size()), writes.data(),
            static_cast<int>(writes.size()), &property, priority, name, always) != 0) {
    fail("MXEnginePushAsyncND");
  }
}

}  // namespace mykv::mxnet
