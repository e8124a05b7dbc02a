#include "gpu/cuda_api.h"

namespace mykv::gpu {

namespace {
constexpr int kOldestCuda = 11000;
}

Cuda::Cuda(const Library& library) : path_(library.path()) {
  library.find("cudaRuntimeGetVersion", &runtime_get_version_);
  library.find("cudaGetErrorName", &get_error_name_);
  library.find("cudaGetErrorString", &get_error_string_);
  check(runtime_get_version_(&version_), "cudaRuntimeGetVersion");
  if (version_ < kOldestCuda) {
    throw Error("the CUDA runtime in " + path_ + " has version " + std::to_string(version_ / 1000) + "." +
                std::to_string(version_ % 1000 / 10) + "; mykv needs 11.0 or later");
  }
  library.find("cudaDriverGetVersion", &driver_get_version_);
  if (const int driver = driver_version(); driver != 0 && driver / 1000 < version_ / 1000) {
    throw Error("the CUDA runtime in " + path_ + " is of CUDA " + std::to_string(version_ / 1000) +
                ", and the driver knows only CUDA " + std::to_string(driver / 1000));
  }
  library.find("cudaGetDeviceCount", &get_device_count_);
  library.find("cudaDeviceGetPCIBusId", &get_bus_id_);
  library.find("cudaGetDevice", &get_device);
  library.find("cudaSetDevice", &set_device);
  library.find("cudaDeviceGetStreamPriorityRange", &get_stream_priority_range);
  library.find("cudaStreamCreateWithPriority", &stream_create);
  library.find("cudaStreamDestroy", &stream_destroy);
  library.find("cudaStreamWaitEvent", &stream_wait_event);
  library.find("cudaEventCreateWithFlags", &event_create);
  library.find("cudaEventRecord", &event_record);
  library.find("cudaEventQuery", &event_query);
  library.find("cudaEventDestroy", &event_destroy);
  library.find("cudaMalloc", &malloc);
  library.find("cudaFree", &free);
  library.find("cudaMemcpyAsync", &memcpy_async);
  library.find("cudaMemsetAsync", &memset_async);
  library.find("cudaHostRegister", &host_register);
  library.find("cudaHostUnregister", &host_unregister);
  library.find("cudaPointerGetAttributes", &pointer_get_attributes);
  library.find("cudaGetLastError", &get_last_error);
}

void Cuda::check(int code, const char* what) const {
  if (code == kSuccess) return;
  if (get_last_error != nullptr) get_last_error();  // clears it: the thread's next caller of CUDA must not get it again
  throw Error(std::string("CUDA failed in ") + what + ": " + get_error_name_(code) + " (" + get_error_string_(code) +
              ")");
}

int Cuda::driver_version() const {
  int version = 0;
  return driver_get_version_(&version) == kSuccess ? version : 0;
}

int Cuda::device_count() const {
  int count = 0;
  if (get_device_count_(&count) == kSuccess) return count;
  get_last_error();  // no driver, or no device: cleared, since the next caller of CUDA would get the error
  return 0;
}

std::string Cuda::bus_id(int device) const {
  char text[32] = "";
  check(get_bus_id_(text, sizeof text, device), "cudaDeviceGetPCIBusId");
  return text;
}

}  // namespace mykv::gpu
