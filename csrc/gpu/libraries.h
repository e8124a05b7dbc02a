// The CUDA runtime and NCCL of this process, if it has them. They are loaded once, before the first world.
#pragma once

#include <climits>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"

namespace mykv::gpu {

// A library that is found at run time, so that one binary serves machines with and without it. It is never unloaded.

class Library {
 public:
  // `name`: a path, or a name that the loader searches for; `what`: its name in messages. Throws Error if it does not
  // load.
  Library(const char* what, const std::string& name);

  bool has(const char* symbol) const;
  const std::string& path() const { return path_; }

  // Throws Error when the library lacks the symbol.
  template <class Function>
  void find(const char* symbol, Function** function) const {
    *function = reinterpret_cast<Function*>(address(symbol));
  }

 private:
  void* address(const char* symbol) const;

  std::string what_;
  std::string path_;
  void* handle_ = nullptr;
};

// The functions of the CUDA runtime that the core calls, found at run time. Prototypes and numbers are those of
// cuda_runtime_api.h and driver_types.h from CUDA 11 to 13, declared here so that building needs no CUDA.

using CudaStream = struct CUstream_st*;
using CudaEvent = struct CUevent_st*;

class Cuda {
 public:
  // Throws Error when the library is older than CUDA 11.0 or lacks a function.
  explicit Cuda(const Library& library);

  // Throws Error, with CUDA's name of the failure, if `code` is a failure. `what`: the function that returned `code`.
  void check(int code, const char* what) const;

  const std::string& path() const { return path_; }
  int version() const { return version_; }  // 1000 * major + 10 * minor
  // The newest CUDA that the driver can run, in the same form; 0: there is no driver.
  int driver_version() const;
  // GPUs that this process sees; 0 without a driver.
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

// The functions of NCCL that the core calls, found at run time. Prototypes and numbers are those of nccl.h from 2.14
// on, declared here so that building needs no NCCL.

using NcclComm = struct ncclComm*;

struct NcclUniqueId {
  char internal[128];
};

// NCCL has lost a peer, whose process may have ended.
class PeerLost : public Error {
 public:
  using Error::Error;
};

// A version of NCCL as text, such as "2.23.4", from the number that NCCL 2.9 and later use for it.
std::string nccl_version_text(int version);

class Nccl {
 public:
  // Throws Error if the library lacks a function, or is older than 2.14, the first version with nonblocking
  // communicators.
  explicit Nccl(const Library& library);

  // Throws Error or PeerLost, with NCCL's text, if `code` is a failure; kInProgress is not a failure. `comm` may be
  // null.
  void check(int code, const char* what, NcclComm comm) const;

  const std::string& path() const { return path_; }
  int version() const { return version_; }  // 10000 * major + 100 * minor + patch

  static constexpr int kSuccess = 0, kRemoteError = 6, kInProgress = 7;
  // ncclDataType_t
  static constexpr int kInt8 = 0, kUint8 = 1, kInt32 = 2, kUint32 = 3, kInt64 = 4, kUint64 = 5, kFloat16 = 6,
                       kFloat32 = 7, kFloat64 = 8, kBfloat16 = 9;
  // ncclRedOp_t
  static constexpr int kSum = 0, kProduct = 1, kMax = 2, kMin = 3, kAverage = 4;
  static constexpr int kScalarHostImmediate = 1;

  // The configuration of every release since 2.14; fields of later releases keep their defaults.
  struct Config {
    size_t size = sizeof(Config);
    unsigned magic = 0xcafebeef;
    unsigned version = 21400;
    int blocking = 0;
  };

  int (*get_unique_id)(NcclUniqueId*);
  int (*comm_init)(NcclComm*, int size, NcclUniqueId, int rank, Config*);
  int (*comm_finalize)(NcclComm);
  int (*comm_destroy)(NcclComm);
  int (*comm_abort)(NcclComm);
  int (*comm_get_async_error)(NcclComm, int*);
  int (*group_start)();
  int (*group_end)();
  int (*all_reduce)(const void*, void*, size_t count, int dtype, int op, NcclComm, CudaStream);
  int (*reduce)(const void*, void*, size_t count, int dtype, int op, int root, NcclComm, CudaStream);
  int (*broadcast)(const void*, void*, size_t count, int dtype, int root, NcclComm, CudaStream);
  int (*all_gather)(const void*, void*, size_t send_count, int dtype, NcclComm, CudaStream);
  int (*reduce_scatter)(const void*, void*, size_t receive_count, int dtype, int op, NcclComm, CudaStream);
  int (*send)(const void*, size_t count, int dtype, int peer, NcclComm, CudaStream);
  int (*receive)(void*, size_t count, int dtype, int peer, NcclComm, CudaStream);
  int (*make_premultiplied_sum)(int* op, void* scalar, int dtype, int residence, NcclComm);
  int (*drop_op)(int op, NcclComm);

 private:
  std::string path_;
  int version_ = 0;
  int (*get_version_)(int*);
  const char* (*get_error_string_)(int);
  const char* (*get_last_error_)(NcclComm) = nullptr;
};

class Libraries {
 public:
  // Loads the first usable candidate (names as in Library) for CUDA and for NCCL. Later calls are no-ops.
  static const Libraries& load(const std::vector<std::string>& cuda, const std::vector<std::string>& nccl);
  // The loaded libraries; none before load().
  static const Libraries& get();

  const Cuda* cuda() const { return cuda_.get(); }  // null: see cuda_problem()
  const Nccl* nccl() const { return nccl_.get(); }
  const std::string& cuda_problem() const { return cuda_problem_; }
  const std::string& nccl_problem() const { return nccl_problem_; }

 private:
  std::unique_ptr<Cuda> cuda_;
  std::unique_ptr<Nccl> nccl_;
  std::string cuda_problem_ = "the CUDA runtime was not looked for";
  std::string nccl_problem_ = "NCCL was not looked for";
};

// The CUDA runtime; throws Error if there is none.
const Cuda& cuda();

}  // namespace mykv::gpu
