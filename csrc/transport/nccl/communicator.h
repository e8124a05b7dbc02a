// An NCCL communicator, with an NCCL rank for each GPU of each rank. It is made without blocking, and polled for
// errors.
#pragma once

#include <vector>

#include "gpu/nccl_api.h"

namespace mykv {

// This rank's part of a communicator.
class NcclCommunicator {
 public:
  struct Local {
    int device;
    gpu::NcclComm comm;
  };

  // Begins to join with this rank's NCCL ranks [first, first + devices.size()) of `size`.
  NcclCommunicator(const gpu::NcclUniqueId& id, int size, int first, const std::vector<int>& devices);
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // Whether no NCCL call is in progress any more. Throws Error if NCCL reports a failure.
  bool settled(const char* what) const;
  int size() const { return size_; }
  const std::vector<Local>& locals() const { return locals_; }

  // Begins the end; call destroy() when settled().
  void finalize();
  void destroy();
  // Ends all operations of the communicator, finished or not.
  void abort() noexcept;

 private:
  int size_;
  std::vector<Local> locals_;
};

// All NCCL calls between construction and end() are one group (ncclGroupStart, ncclGroupEnd).
class NcclCallGroup {
 public:
  NcclCallGroup();
  ~NcclCallGroup();
  NcclCallGroup(const NcclCallGroup&) = delete;
  NcclCallGroup& operator=(const NcclCallGroup&) = delete;
  void end();

 private:
  bool open_ = true;
};

const gpu::Nccl& nccl();

}  // namespace mykv
