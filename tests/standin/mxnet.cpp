// Stand-in for libmxnet. Operations run in threads of their own, when all that came before on their arrays is done; one
// whose arrays carry an error is not run, and only its deleter is called, as MXNet does.
#include "mxnet.h"

#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int kGpu = 2;
constexpr size_t kItemBytes[] = {4, 8, 2, 1, 4, 1, 8, 1};  // by MXNet's number of the type

struct Context {
  int type, number;
};

struct Operation;

struct Chunk {
  std::shared_ptr<Operation> last;
  std::string error;
};

struct Array {  // the first word tells which arrays have their storage in common
  Chunk* storage;
  std::shared_ptr<Chunk> chunk;
  void* data;
  Context context;
  int dtype;
  std::vector<int64_t> shape;
};

struct Callback {
  void (*call)(void* engine, void* parameter, const void* error);
  void* engine;
  void* parameter;
};

struct Operation {
  void* function;
  void* parameter;
  void (*deleter)(void*);
  Context context;
  std::vector<std::shared_ptr<Chunk>> chunks;
  std::vector<std::shared_ptr<Operation>> before;
  std::shared_ptr<Operation> self;  // until it is done
  bool done = false;
};

std::mutex lock;  // of all below
std::condition_variable& changed = *new std::condition_variable;
int operations = 0, handles = 0, last_property = -1, last_device_type = -1;
std::atomic<int> failing{0}, errors_at_once{0}, fails_to_push{0};
int release = 1;
void (*on_start)() = nullptr;

Array* array_of(void* handle) { return static_cast<Array*>(handle); }

void end(Operation& operation, const std::string& error) {
  operation.deleter(operation.parameter);
  std::lock_guard<std::mutex> guard(lock);
  for (const auto& chunk : operation.chunks) chunk->error = error;
  operation.done = true;
  operation.before.clear();
  operation.chunks.clear();
  operation.self.reset();
  --operations;
  changed.notify_all();
}

void complete(void*, void* parameter, const void* error) {
  const std::shared_ptr<Operation> operation = static_cast<Operation*>(parameter)->self;
  if (error != nullptr) {
    errors_at_once += failing.fetch_add(1) > 0;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    --failing;
  }
  // dmlc::Error is a std::runtime_error.
  end(*operation, error ? static_cast<const std::exception*>(error)->what() : "");
}

void start(void*, void*, const void*) { on_start(); }

void run(const std::shared_ptr<Operation>& operation) {
  std::string error;
  {
    std::unique_lock<std::mutex> guard(lock);
    for (const auto& one : operation->before) changed.wait(guard, [&] { return one->done; });
    for (const auto& chunk : operation->chunks) {
      if (error.empty()) error = chunk->error;
    }
  }
  if (!error.empty()) {
    end(*operation, error);
    return;
  }
  struct {
    Context context;
    void* stream;
    char rest[64];
  } run_context{operation->context, nullptr, {}};
  Callback on_complete{&complete, nullptr, operation.get()};
  if (release == 1) {
    reinterpret_cast<void (*)(void*, void*, void*)>(operation->function)(&run_context, &on_complete,
                                                                         operation->parameter);
  } else {
    Callback before{on_start != nullptr ? &start : nullptr, nullptr, nullptr};
    reinterpret_cast<void (*)(void*, void*, void*, void*)>(operation->function)(&run_context, &before, &on_complete,
                                                                                operation->parameter);
  }
}

}  // namespace

STANDIN_API void* standin_mx_array(void* data, int device_type, int device, int dtype, int dimensions,
                                   const int64_t* shape) {
  const auto chunk = std::make_shared<Chunk>();
  std::lock_guard<std::mutex> guard(lock);
  ++handles;
  return new Array{chunk.get(), chunk, data, {device_type, device}, dtype, {shape, shape + dimensions}};
}

STANDIN_API int standin_mx_wait(void* array, double seconds, char* error, size_t bytes) {
  std::unique_lock<std::mutex> guard(lock);
  const Chunk& chunk = *array_of(array)->chunk;
  const auto last = chunk.last;
  if (last && !changed.wait_for(guard, std::chrono::duration<double>(seconds), [&] { return last->done; })) return -1;
  std::strncpy(error, chunk.error.c_str(), bytes - 1);
  error[bytes - 1] = '\0';
  return chunk.error.empty() ? 0 : 1;
}

STANDIN_API void standin_mx_spoil(void* array, const char* error) {
  std::lock_guard<std::mutex> guard(lock);
  array_of(array)->chunk->error = error;
}

STANDIN_API void standin_mx_release(int major, void (*function)()) {
  release = major;
  on_start = function;
}

STANDIN_API void standin_mx_fail_to_push(int how) { fails_to_push = how; }

STANDIN_API int standin_mx_errors_at_once() { return errors_at_once; }

STANDIN_API int standin_mx_last_property() { return last_property; }
STANDIN_API int standin_mx_last_device_type() { return last_device_type; }

STANDIN_API int standin_mx_operations() {
  std::lock_guard<std::mutex> guard(lock);
  return operations;
}

STANDIN_API int standin_mx_handles() {
  std::lock_guard<std::mutex> guard(lock);
  return handles;
}

STANDIN_API int MXEnginePushAsyncND(void* function, void* parameter, void (*deleter)(void*), const Context* context,
                                    void* const* reads, int n_reads, void* const* writes, int n_writes,
                                    const int* property, int, const char*, bool) {
  const int failure = fails_to_push.exchange(0);
  if (failure == 2) deleter(parameter);
  if (failure != 0) return -1;
  const auto operation = std::make_shared<Operation>();
  operation->function = function;
  operation->parameter = parameter;
  operation->deleter = deleter;
  operation->context = *context;
  operation->self = operation;
  {
    std::lock_guard<std::mutex> guard(lock);
    for (int i = 0; i < n_reads + n_writes; ++i) {
      const auto& chunk = array_of(i < n_reads ? reads[i] : writes[i - n_reads])->chunk;
      if (chunk->last && !chunk->last->done) operation->before.push_back(chunk->last);
      chunk->last = operation;
      operation->chunks.push_back(chunk);
    }
    ++operations;
    last_property = *property;
    last_device_type = context->type;
  }
  std::thread(run, operation).detach();
  return 0;
}

STANDIN_API int MXNDArrayDetach(void* array, void** copy) {
  std::lock_guard<std::mutex> guard(lock);
  ++handles;
  *copy = new Array(*array_of(array));
  return 0;
}

STANDIN_API int MXNDArrayFree(void* array) {
  std::lock_guard<std::mutex> guard(lock);
  --handles;
  delete array_of(array);
  return 0;
}

STANDIN_API int MXNDArrayGetData(void* array, void** data) {
  *data = array_of(array)->data;
  return 0;
}

STANDIN_API int MXNDArrayWaitToRead(void* array) {
  std::unique_lock<std::mutex> guard(lock);
  const auto last = array_of(array)->chunk->last;
  if (last) changed.wait(guard, [&] { return last->done; });
  return 0;
}

// Operations here run in the order of their pushes on an array, so that nothing reads it after the last one has ended.
STANDIN_API int MXNDArrayWaitToWrite(void* array) { return MXNDArrayWaitToRead(array); }

STANDIN_API int MXNDArraySyncCopyToCPU(void* array, void* data, size_t count) {
  const Array& from = *array_of(array);
  const size_t bytes = count * kItemBytes[from.dtype];
  if (from.context.type != kGpu) {
    std::memcpy(data, from.data, bytes);
    return 0;
  }
  // The test has loaded it.
  const char* const file = std::getenv("MYKV_CUDA_LIBRARY");
  void* const cuda = dlopen(file != nullptr ? file : "libcudart.so.12", RTLD_LAZY | RTLD_NOLOAD);
  void* const copy = cuda != nullptr ? dlsym(cuda, "cudaMemcpy") : nullptr;
  constexpr int kDeviceToHost = 2;
  if (copy == nullptr) return -1;
  return reinterpret_cast<int (*)(void*, const void*, size_t, int)>(copy)(data, from.data, bytes, kDeviceToHost);
}

STANDIN_API int MXNDArrayGetShapeEx(void* array, int* dimensions, const int** shape) {
  static thread_local std::vector<int> sizes;
  sizes.assign(array_of(array)->shape.begin(), array_of(array)->shape.end());
  *dimensions = static_cast<int>(sizes.size());
  *shape = sizes.data();
  return 0;
}

STANDIN_API int MXNDArrayGetShape(void* array, int* dimensions, const int** shape) {
  return MXNDArrayGetShapeEx(array, dimensions, shape);
}

STANDIN_API int MXNDArrayGetShape64(void* array, int* dimensions, const int64_t** shape) {
  *dimensions = static_cast<int>(array_of(array)->shape.size());
  *shape = array_of(array)->shape.data();
  return 0;
}

STANDIN_API int MXNDArrayGetShapeEx64(void* array, int* dimensions, const int64_t** shape) {
  return MXNDArrayGetShape64(array, dimensions, shape);
}

STANDIN_API int MXNDArrayGetDType(void* array, int* dtype) {
  *dtype = array_of(array)->dtype;
  return 0;
}

STANDIN_API int MXNDArrayGetStorageType(void*, int* type) {
  *type = 0;
  return 0;
}

STANDIN_API int MXNDArrayGetContext(void* array, int* type, int* number) {
  *type = array_of(array)->context.type;
  *number = array_of(array)->context.number;
  return 0;
}

STANDIN_API const char* MXGetLastError() { return "no error"; }
