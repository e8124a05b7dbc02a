#include "gpu/nccl_api.h"

namespace mykv::gpu {

namespace {

constexpr int kOldestNccl = 21400;

std::string version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

}  // namespace

Nccl::Nccl(const Library& library) : path_(library.path()) {
  library.find("ncclGetVersion", &get_version_);
  library.find("ncclGetErrorString", &get_error_string_);
  check(get_version_(&version_), "ncclGetVersion", nullptr);
  if (version_ < kOldestNccl) {
    // Before 2.9 the number had another form: 1000 * major + 100 * minor + patch.
    const int version = version_ < 10000 ? version_ / 1000 * 10000 + version_ % 1000 : version_;
    throw Error("the NCCL in " + path_ + " has version " + version_text(version) + "; mykv needs 2.14 or later");
  }
  library.find("ncclGetLastError", &get_last_error_);
  library.find("ncclGetUniqueId", &get_unique_id);
  library.find("ncclCommInitRankConfig", &comm_init);
  library.find("ncclCommFinalize", &comm_finalize);
  library.find("ncclCommDestroy", &comm_destroy);
  library.find("ncclCommAbort", &comm_abort);
  library.find("ncclCommGetAsyncError", &comm_get_async_error);
  library.find("ncclGroupStart", &group_start);
  library.find("ncclGroupEnd", &group_end);
  library.find("ncclAllReduce", &all_reduce);
  library.find("ncclReduce", &reduce);
  library.find("ncclBroadcast", &broadcast);
  library.find("ncclAllGather", &all_gather);
  library.find("ncclReduceScatter", &reduce_scatter);
  library.find("ncclSend", &send);
  library.find("ncclRecv", &receive);
  library.find("ncclRedOpCreatePreMulSum", &make_premultiplied_sum);
  library.find("ncclRedOpDestroy", &drop_op);
}

void Nccl::check(int code, const char* what, NcclComm comm) const {
  if (code == kSuccess || code == kInProgress) return;
  std::string text = std::string("NCCL failed in ") + what + ": " + get_error_string_(code);
  const char* more = get_last_error_ != nullptr ? get_last_error_(comm) : nullptr;
  if (more != nullptr && *more != '\0') text += std::string(" (") + more + ")";
  if (code == kRemoteError) throw PeerLost(text);
  throw Error(text);
}

}  // namespace mykv::gpu
