// Stand-in for libcuda, as far as mx.rtc.CudaModule needs it: kernels are those of tests/gpu/test_mxnet_on_gpu.py, done
// by the thread of their stream.
#include <unistd.h>

#include <string>

#include "../standin.h"

namespace {

int place;  // something to point to

struct Kernel {
  std::string name;
  int device = 0;
  float* out = nullptr;
  const float* x = nullptr;
  const float* y = nullptr;
  float a = 0, b = 0;
  int n = 0;
};

template <class T>
T* at(void* argument) {
  return static_cast<T*>(standin_alias(*static_cast<void**>(argument)));
}

int run(void* argument) {
  Kernel* k = static_cast<Kernel*>(argument);
  for (int i = 0; i < k->n; ++i) {
    if (k->name == "weighted_sum") k->out[i] = k->a * k->x[i] + k->b * k->y[i];
    if (k->name == "product") k->out[i] = k->x[i] * k->y[i];
    if (k->name == "descend") k->out[i] -= k->a * k->x[i];
    if (k->name == "late_copy") k->out[i] = k->x[i];
  }
  delete k;
  return 0;
}

}  // namespace

STANDIN_API int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
STANDIN_API int cuDevicePrimaryCtxRetain(void** context, int) {
  *context = &place;
  return 0;
}
STANDIN_API int cuGetErrorString(int, const char** text) {
  *text = "an error of the stand-in for libcuda";
  return 0;
}
STANDIN_API int cuGraphKernelNodeGetParams(...) { return 801; }
STANDIN_API int cuGraphNodeGetType(...) { return 801; }
STANDIN_API int cuModuleLoadData(void** module, const void*) {
  *module = &place;
  return 0;
}
STANDIN_API int cuModuleLoadDataEx(void** module, const void*, unsigned, void*, void*) {
  *module = &place;
  return 0;
}
STANDIN_API int cuModuleUnload(void*) { return 0; }
STANDIN_API int cuModuleGetFunction(void** function, void*, const char* name) {
  *function = new std::string(name);  // as long as the process
  return 0;
}

STANDIN_API int cuLaunchKernel(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                               void* stream, void** arguments, void**) {
  const std::string& name = *static_cast<std::string*>(function);
  Kernel* k = new Kernel{name, standin_stream_device(stream)};
  k->out = at<float>(arguments[0]);
  k->x = at<const float>(arguments[1]);
  if (name == "weighted_sum") {
    k->y = at<const float>(arguments[2]);
    k->a = *static_cast<float*>(arguments[3]);
    k->b = *static_cast<float*>(arguments[4]);
    k->n = *static_cast<int*>(arguments[5]);
  } else if (name == "product") {
    k->y = at<const float>(arguments[2]);
    k->n = *static_cast<int*>(arguments[3]);
  } else {
    if (name == "descend") k->a = *static_cast<float*>(arguments[2]);
    if (name == "late_copy") standin_delay(k->device, stream, 1000);
    k->n = *static_cast<int*>(arguments[3]);
  }
  return standin_enqueue(k->device, stream, run, k);
}
