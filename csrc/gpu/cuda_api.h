// The functions of the CUDA runtime that the core calls, found at run time. Prototypes and numbers are those of
// cuda_runtime_api.h and driver_types.h from CUDA 11 to 13, declared here so that building needs no CUDA.
#pragma once

#include <cstddef>
#include <string>

#include "gpu/library.h"

namespace mykv::gpu {

using CudaStream = struct CUstream_st*;
using CudaEvent = struct CUevent_st*;

class Cuda {
 public:
  // Throws Error when the library is older than CUDA 11.0 or lacks a function.
  explicit Cuda(const Library& library);

  // Throws Error with CUDA's name of the failure, when `code` is one. `what`: the function that gave it.
  void check(int code, const char* what) const;

  const std::string& path() const { return path_; }
  int version() const { return version_; }  // 1000 * major + 10 * minor
  // The newest CUDA that the driver can run, in the same form; 0: there is no driver.
  int driver_version() const;
  // GPUs that this process sees; 0 where there is no driver.
  int device_count() const;
  // The same GPU has the same text in all processes of the machine.
  std::string bus_id(int device) const;

  static constexpr int kSuccess = 0, kNotReady = 600;
  static constexpr int kMemcpyDefault = 4;  // the direction follows from the addresses
  static constexpr unsigned kEventDisableTiming = 2, kStreamNonBlocking = 1, kHostRegisterPortable = 1;
  static constexpr int kMemoryTypeDevice = 2, kMemoryTypeManaged = 3;

  struct PointerAttributes {
    int type;
    int device;
    void* device_pointer;
    void* host_pointer;
    void* reserved[8];  // since CUDA 13
  };

  int (*get_device)(int*);
  int (*set_device)(int);
  int (*get_stream_priority_range)(int* least, int* greatest);
  int (*stream_create)(CudaStream*, unsigned flags, int priority);
  int (*stream_destroy)(CudaStream);
  int (*stream_wait_event)(CudaStream, CudaEvent, unsigned flags);
  int (*event_create)(CudaEvent*, unsigned flags);
  int (*event_record)(CudaEvent, CudaStream);
  int (*event_query)(CudaEvent);
  int (*event_destroy)(CudaEvent);
  int (*malloc)(void**, size_t);
  int (*free)(void*);
  int (*memcpy_async)(void* to, const void* from, size_t bytes, int kind, CudaStream);
  int (*memset_async)(void* to, int value, size_t bytes, CudaStream);
  int (*host_register)(void*, size_t bytes, unsigned flags);
  int (*host_unregister)(void*);
  int (*pointer_get_attributes)(PointerAttributes*, const void*);
  int (*get_last_error)() = nullptr;

 private:
  std::string path_;
  int version_ = 0;
  int (*get_device_count_)(int*);
  int (*runtime_get_version_)(int*);
  int (*driver_get_version_)(int*);
  int (*get_bus_id_)(char*, int length, int device);
  const char* (*get_error_name_)(int);
  const char* (*get_error_string_)(int);
};

}  // namespace mykv::gpu
