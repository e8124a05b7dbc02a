// The functions of MXNet's C API that the bridge calls, found at run time in the library that Python has loaded. So one
// binary works with every release, and building needs no MXNet. Signatures are those of releases 1.9 and 2.0
// (include/mxnet/c_api.h).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace mykv::mxnet {

using Handle = void*;  // NDArrayHandle

struct Context {
  int device_type;  // 1: cpu, 2: gpu, 3: pinned, 5: shared
  int device_id;
};
constexpr int kCpu = 1, kGpu = 2, kCpuPinned = 3, kCpuShared = 5;

// FnProperty. In every case the operation signals completion by a callback.
// The function runs in the thread that makes the operation ready, possibly the pushing thread.
constexpr int kAsync = 4;
constexpr int kCpuPrioritized = 3;  // the function runs in a worker for the CPU

// The callback by which an asynchronous operation reports to the engine (Engine::CallbackOnComplete, CallbackOnStart).
struct EngineCallback {
  void (*call)(void* engine, void* parameter, const void* error);
  void* engine;
  void* parameter;
};

// The first members of RunContext, which MXNet's engine passes to an operation. In releases 1.9 and 2.0 they are the
// device and a pointer to its mshadow::Stream. On a GPU, the Stream begins with the CUDA stream.
struct RunContext {
  Context context;
  void* stream;  // may be null
};

class Api {
 public:
  // `library`: the handle of dlopen; `major`: MXNet's major version. Throws Error if a symbol is missing.
  Api(void* library, int major);

  // A new handle for the same array, valid until release().
  Handle retain(Handle array) const;
  void release(Handle array) const;
  // The memory, in default layout. Call it only inside an engine operation that writes the array: its layout may
  // change.
  void* data(Handle array) const;
  // Arrays with the same storage (views of one array) have the same value here.
  const void* storage(Handle array) const { return *static_cast<void* const*>(array); }

  int dtype(Handle array) const;
  int storage_type(Handle array) const;  // 0: dense
  Context context(Handle array) const;
  // Throws Error if the shape is not known yet.
  std::vector<size_t> shape(Handle array) const;

  int major() const { return major_; }
  // Pushes an operation for the CPU. `always`: the engine calls the function even if an array carries an error.
  void push(void* function, void* parameter, void (*deleter)(void*), const std::vector<Handle>& reads,
            const std::vector<Handle>& writes, int property, int priority, const char* name, bool always = false) const;

 private:
  [[noreturn]] void fail(const char* what) const;

  int major_;
  int (*push_)(void*, void*, void (*)(void*), void*, const Handle*, int, const Handle*, int, void*, int, const char*,
               bool);
  int (*detach_)(Handle, Handle*);
  int (*free_)(Handle);
  int (*get_data_)(Handle, void**);
  int (*get_shape_)(Handle, int*, const int64_t**);
  int (*get_dtype_)(Handle, int*);
  int (*get_storage_type_)(Handle, int*);
  int (*get_context_)(Handle, int*, int*);
  const char* (*get_error_)();
  // Absent from builds without oneDNN, whose arrays are never blocked.
  bool (*is_blocked_)(const void* chunk) = nullptr;  // mxnet::NDArray::Chunk::IsMKLDNN() / IsDNNL() const
  void (*reorder_)(void* chunk) = nullptr;           // mxnet::NDArray::Chunk::Reorder2Default()
};

}  // namespace mykv::mxnet
