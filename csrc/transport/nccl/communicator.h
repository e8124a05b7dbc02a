// One communicator of NCCL's: a place in it for each GPU of each rank. It is made without blocking, and watched.
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

  // Begins to take this rank's places [first, first + devices.size()) of `size`.
  NcclCommunicator(const gpu::NcclUniqueId& id, int size, int first, const std::vector<int>& devices);
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // Whether nothing is in progress any more. Throws Error where NCCL reports a failure.
  bool settled(const char* what) const;
  int size() const { return size_; }
  const std::vector<Local>& locals() const { return locals_; }

  // Begins the end, which is there when it has settled; then destroy().
  void finalize();
  void destroy();
  // Ends what the communicator has under way, anyhow.
  void abort() noexcept;

 private:
  int size_;
  std::vector<Local> locals_;
};

// Between the two all calls of NCCL's are one.
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
