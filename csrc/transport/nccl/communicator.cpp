#include "transport/nccl/communicator.h"

#include <utility>

#include "base/error.h"
#include "gpu/device.h"
#include "gpu/libraries.h"

namespace mykv {

const gpu::Nccl& nccl() {
  const gpu::Nccl* found = gpu::Libraries::get().nccl();
  if (found == nullptr) throw Error(gpu::Libraries::get().nccl_problem());
  return *found;
}

NcclCallGroup::NcclCallGroup() { nccl().check(nccl().group_start(), "ncclGroupStart", nullptr); }

NcclCallGroup::~NcclCallGroup() {
  if (open_) nccl().group_end();
}

void NcclCallGroup::end() {
  open_ = false;
  nccl().check(nccl().group_end(), "ncclGroupEnd", nullptr);
}

NcclCommunicator::NcclCommunicator(const gpu::NcclUniqueId& id, int size, int first, const std::vector<int>& devices)
    : size_(size) {
  for (const int device : devices) locals_.push_back({device, nullptr});
  try {
    NcclCallGroup group;
    for (size_t i = 0; i < locals_.size(); ++i) {
      const gpu::DeviceScope scope(locals_[i].device);
      gpu::Nccl::Config config;
      const int code = nccl().comm_init(&locals_[i].comm, size, id, first + static_cast<int>(i), &config);
      nccl().check(code, "ncclCommInitRankConfig", nullptr);
    }
    group.end();
  } catch (const Error&) {
    abort();
    throw;
  }
}

bool NcclCommunicator::settled(const char* what) const {
  bool all = true;
  for (const Local& local : locals_) {
    int state = gpu::Nccl::kSuccess;
    nccl().check(nccl().comm_get_async_error(local.comm, &state), "ncclCommGetAsyncError", local.comm);
    nccl().check(state, what, local.comm);
    all = all && state != gpu::Nccl::kInProgress;
  }
  return all;
}

void NcclCommunicator::finalize() {
  NcclCallGroup group;
  for (const Local& local : locals_) nccl().check(nccl().comm_finalize(local.comm), "ncclCommFinalize", local.comm);
  group.end();
}

void NcclCommunicator::destroy() {
  for (Local& local : locals_) {
    const gpu::NcclComm comm = std::exchange(local.comm, nullptr);
    nccl().check(nccl().comm_destroy(comm), "ncclCommDestroy", nullptr);
  }
  locals_.clear();
}

void NcclCommunicator::abort() noexcept {
  for (const Local& local : locals_) {
    if (local.comm != nullptr) nccl().comm_abort(local.comm);
  }
  locals_.clear();
}

}  // namespace mykv
