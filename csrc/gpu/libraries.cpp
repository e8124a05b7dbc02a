#include "gpu/libraries.h"

#include <dlfcn.h>
#include <link.h>

#include <mutex>

namespace mykv::gpu {

Library::Library(const char* what, const std::string& name) : what_(what), path_(name) {
  handle_ = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle_ == nullptr) throw Error(what_ + " cannot be loaded: " + dlerror());
  link_map* map = nullptr;
  if (dlinfo(handle_, RTLD_DI_LINKMAP, &map) == 0 && map->l_name[0] != '\0') path_ = map->l_name;
}

bool Library::has(const char* symbol) const { return dlsym(handle_, symbol) != nullptr; }

void* Library::address(const char* symbol) const {
  void* found = dlsym(handle_, symbol);
  if (found == nullptr) throw Error(what_ + " in " + path_ + " has no " + symbol);
  return found;
}

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
                ", but the driver supports only CUDA " + std::to_string(driver / 1000));
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
  if (get_last_error != nullptr)
    get_last_error();  // clears the error, so that the thread's next CUDA call does not return it
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
  get_last_error();  // no driver, or no device: cleared, so that the next CUDA call does not return it
  return 0;
}

std::string Cuda::bus_id(int device) const {
  char text[32] = "";
  check(get_bus_id_(text, sizeof text, device), "cudaDeviceGetPCIBusId");
  return text;
}

namespace {

constexpr int kOldestNccl = 21400;

}  // namespace

std::string nccl_version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

Nccl::Nccl(const Library& library) : path_(library.path()) {
  library.find("ncclGetVersion", &get_version_);
  library.find("ncclGetErrorString", &get_error_string_);
  check(get_version_(&version_), "ncclGetVersion", nullptr);
  if (version_ < kOldestNccl) {
    // Before 2.9 the version was 1000 * major + 100 * minor + patch.
    const int version = version_ < 10000 ? version_ / 1000 * 10000 + version_ % 1000 : version_;
    throw Error("the NCCL in " + path_ + " has version " + nccl_version_text(version) + "; mykv needs 2.14 or later");
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

namespace {

// Never destroyed: threads of MXNet's engine may still use it at exit.
Libraries& instance() {
  static Libraries& libraries = *new Libraries;
  return libraries;
}

// Loads the first candidate that has `probe` and can be used; otherwise *problem says why no existing candidate can be
// used.
template <class Api>
void load_one(const char* what, const char* probe, const std::vector<std::string>& candidates,
              std::unique_ptr<Api>* api, std::string* problem) {
  problem->clear();
  for (const std::string& candidate : candidates) {
    try {
      const Library library(what, candidate);
      if (!library.has(probe)) continue;  // one candidate is MXNet's library, which may lack the function
      try {
        *api = std::make_unique<Api>(library);
        problem->clear();
        return;
      } catch (const Error& error) {
        *problem += (problem->empty() ? "" : "; ") + std::string(error.what());
      }
    } catch (const Error&) {
      // The candidate does not exist.
    }
  }
  if (problem->empty()) {
    *problem = std::string(what) + " was not found";
    if (candidates.size() == 1) *problem += " in " + candidates[0];
  }
}

}  // namespace

const Libraries& Libraries::load(const std::vector<std::string>& cuda, const std::vector<std::string>& nccl) {
  static std::once_flag once;
  std::call_once(once, [&] {
    Libraries& libraries = instance();
    load_one("the CUDA runtime", "cudaGetDeviceCount", cuda, &libraries.cuda_, &libraries.cuda_problem_);
    load_one("NCCL", "ncclGetVersion", nccl, &libraries.nccl_, &libraries.nccl_problem_);
  });
  return instance();
}

const Libraries& Libraries::get() { return instance(); }

const Cuda& cuda() {
  const Cuda* found = Libraries::get().cuda();
  if (found == nullptr) throw Error(Libraries::get().cuda_problem());
  return *found;
}

}  // namespace mykv::gpu
