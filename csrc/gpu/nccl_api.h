// The functions of NCCL that the core calls, found at run time. Prototypes and numbers are those of nccl.h from 2.14
// on, declared here so that building needs no NCCL.
#pragma once

#include <climits>
#include <cstddef>
#include <string>

#include "base/error.h"
#include "gpu/cuda_api.h"
#include "gpu/library.h"

namespace mykv::gpu {

using NcclComm = struct ncclComm*;

struct NcclUniqueId {
  char internal[128];
};

// NCCL has lost a peer, whose process may have ended.
class PeerLost : public Error {
 public:
  using Error::Error;
};

class Nccl {
 public:
  // Throws Error if the library lacks a function, or is older than 2.14, the first version with nonblocking
  // communicators.
  explicit Nccl(const Library& library);

  // Throws Error or PeerLost, with NCCL's text, if `code` is a failure; kInProgress is no failure. `comm` may be null.
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

  // The configuration that every release since 2.14 takes; fields of later releases have their defaults.
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

}  // namespace mykv::gpu
