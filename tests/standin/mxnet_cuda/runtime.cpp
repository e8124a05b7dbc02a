// What an MXNet that is built for CUDA needs of libcudart beside the functions of the stand-in. No kernel of MXNet's
// runs: the GPUs are of compute capability 9.0, for which its builds have none.
#include <cstdlib>
#include <cstring>

#include "../cudart.h"

extern "C" {

int cudaMalloc(void** pointer, size_t bytes);
int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void* stream);
int cudaStreamCreateWithFlags(void** stream, unsigned flags);
}

namespace {

constexpr int kNoKernelImage = 209, kNotSupported = 801;
constexpr int kMajor = 75, kMinor = 76;   // cudaDevAttrComputeCapability...
constexpr size_t kPropertiesBytes = 728;  // of cudaDeviceProp in CUDA 11
constexpr int kDeviceToDevice = 3;
void* fatbin;

}  // namespace

STANDIN_API int __cudaInitModule(void*) { return 0; }
STANDIN_API int __cudaPopCallConfiguration(void*, void*, void*, void*) { return 0; }
STANDIN_API unsigned __cudaPushCallConfiguration(...) { return 0; }
STANDIN_API void** __cudaRegisterFatBinary(void*) { return &fatbin; }
STANDIN_API void __cudaRegisterFatBinaryEnd(void**) {}
STANDIN_API void __cudaRegisterFunction(...) {}
STANDIN_API void __cudaRegisterVar(...) {}
STANDIN_API void __cudaUnregisterFatBinary(void**) {}

STANDIN_API int cudaDeviceCanAccessPeer(int* yes, int, int) {
  *yes = 0;
  return 0;
}
STANDIN_API int cudaDeviceEnablePeerAccess(int, unsigned) { return 0; }
STANDIN_API int cudaDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == kMajor ? 9 : attribute == kMinor ? 0 : 1024;
  return 0;
}
STANDIN_API int cudaDeviceGetP2PAttribute(int* value, int, int, int) {
  *value = 0;
  return 0;
}
STANDIN_API int cudaGetDeviceProperties(void* properties, int) {
  std::memset(properties, 0, kPropertiesBytes);
  return 0;
}

STANDIN_API int cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  *pointer = std::malloc(bytes ? bytes : 1);
  return *pointer ? 0 : 2;
}
STANDIN_API int cudaFreeHost(void* pointer) {
  std::free(pointer);
  return 0;
}
STANDIN_API int cudaMallocPitch(void** pointer, size_t* pitch, size_t width, size_t height) {
  *pitch = width;
  return cudaMalloc(pointer, width * height);
}
STANDIN_API int cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                  size_t height, int kind, void* stream) {
  for (size_t row = 0; row < height; ++row) {
    const int code = cudaMemcpyAsync(static_cast<char*>(to) + row * to_pitch,
                                     static_cast<const char*>(from) + row * from_pitch, width, kind, stream);
    if (code != 0) return code;
  }
  return 0;
}
STANDIN_API int cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, void* stream) {
  return cudaMemcpyAsync(to, from, bytes, kDeviceToDevice, stream);
}
STANDIN_API int cudaStreamCreate(void** stream) { return cudaStreamCreateWithFlags(stream, 0); }

STANDIN_API int cudaLaunchKernel(...) {
  return standin::called("cudaLaunchKernel", true, [] { return kNoKernelImage; });
}
STANDIN_API int cudaFuncGetAttributes(...) { return kNoKernelImage; }
STANDIN_API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(...) { return kNoKernelImage; }
STANDIN_API int cudaStreamBeginCapture(...) { return kNotSupported; }
STANDIN_API int cudaStreamEndCapture(...) { return kNotSupported; }
STANDIN_API int cudaGraphDestroy(...) { return kNotSupported; }
STANDIN_API int cudaGraphExecDestroy(...) { return kNotSupported; }
STANDIN_API int cudaGraphExecUpdate(...) { return kNotSupported; }
STANDIN_API int cudaGraphGetNodes(...) { return kNotSupported; }
STANDIN_API int cudaGraphInstantiate(...) { return kNotSupported; }
STANDIN_API int cudaGraphLaunch(...) { return kNotSupported; }
STANDIN_API int cudaGraphMemcpyNodeGetParams(...) { return kNotSupported; }
STANDIN_API int cudaGraphMemsetNodeGetParams(...) { return kNotSupported; }
