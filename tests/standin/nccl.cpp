// Stand-in for libnccl: communicators of processes of one machine. No header of NCCL's is used; the names, prototypes
// and numbers are those of its C interface, 2.14 to 2.27.
#include "nccl.h"

#include <unistd.h>

#include <climits>
#include <cstring>
#include <thread>

namespace standin {
namespace {

std::mutex lock;  // of all below
std::map<void*, CommPointer>& comms = *new std::map<void*, CommPointer>;

CommPointer forget(void* handle) {
  std::lock_guard<std::mutex> guard(lock);
  auto found = comms.find(handle);
  if (found == comms.end()) return nullptr;
  CommPointer comm = found->second;
  comms.erase(found);
  return comm;
}

int initialize(Comm& comm, const UniqueId& id) {
  if (cuda().device_error(comm.device) != 0)
    return failed(kUnhandledCudaError, "Cuda failure %d", cuda().device_error(comm.device));
  if (!comm.blocking) usleep(2000);
  if (!comm.meeting->open(id)) return failed(kSystemError, "Call to connect failed : Connection refused");
  auto wait = [&](const std::function<bool()>& condition) {
    bool orphan = false;
    return comm.wait([&] { return condition() || (orphan = comm.meeting->maker_is_dead()); }) && !orphan;
  };
  std::string text;
  int result = comm.meeting->join(comm.rank, comm.size, cuda().bus_id(comm.device), wait, &text);
  return result == kSuccess ? result : failed(result, "%s", text.c_str());
}

int make(void** handle, int size, const UniqueId& id, int rank, bool blocking) {
  if (!handle) return failed(kInvalidArgument, "newcomm argument is NULL");
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size)
    return failed(kInvalidArgument, "Invalid rank requested : %d/%d", rank, size);
  auto comm = std::make_shared<Comm>();
  comm->rank = rank;
  comm->size = size;
  comm->device = cuda().current_device();
  comm->blocking = blocking;
  comm->meeting = std::make_unique<Meeting>();
  {
    std::lock_guard<std::mutex> guard(lock);
    comms[comm.get()] = comm;
  }
  *handle = comm.get();
  return add_initialization(comm, [comm, id, handle, blocking] {
    int result = initialize(*comm, id);
    if (result != kSuccess && blocking) {
      forget(comm.get());
      *handle = nullptr;
    }
    return result;
  });
}

// Until nothing of the communicator is in a stream; false if it never will be.
bool drained(const Comm& comm) {
  while (comm.queued > 0) {
    if (comm.stopped()) return false;
    usleep(200);
  }
  return true;
}

}  // namespace

CommPointer find_comm(void* handle) {
  std::lock_guard<std::mutex> guard(lock);
  auto found = comms.find(handle);
  return found == comms.end() ? nullptr : found->second;
}

int no_comm(void* handle) {
  if (handle) cuda().violate("NCCL: use of a communicator that does not exist");
  return failed(kInvalidArgument, "comm argument is %s", handle ? "no communicator" : "NULL");
}

int ensure_ready(const Comm& comm) {
  int error = comm.error;
  if (error == kInProgress)
    return failed(kInvalidArgument, "Attempt to use communicator before the previous operation returned ncclSuccess");
  return error;
}

}  // namespace standin

using namespace standin;

STANDIN_API int ncclGetVersion(int* version) {
  if (int code = entered(__func__)) return code;
  if (!version) return kInvalidArgument;
  *version = standin::version();
  return kSuccess;
}

STANDIN_API int ncclGetUniqueId(UniqueId* id) {
  if (int code = entered(__func__)) return code;
  if (!id) return failed(kInvalidArgument, "GetUniqueId : uniqueId argument is NULL");
  return Meeting::make(id) ? static_cast<int>(kSuccess) : failed(kSystemError, "memfd_create failed");
}

STANDIN_API int ncclCommInitRank(void** comm, int size, UniqueId id, int rank) {
  if (int code = entered(__func__)) return group_fail(code);
  return make(comm, size, id, rank, true);
}

struct Config {  // the part of ncclConfig_t that all versions have
  size_t size;
  unsigned magic;
  unsigned version;
  int blocking;
};

STANDIN_API int ncclCommInitRankConfig(void** comm, int size, UniqueId id, int rank, Config* config) {
  if (int code = entered(__func__)) return group_fail(code);
  if (config && config->magic != 0xcafebeef)
    return group_fail(failed(kInvalidArgument, "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER"));
  if (config && config->blocking != INT_MIN && config->blocking != 0 && config->blocking != 1)
    return group_fail(failed(kInvalidArgument, "Invalid config blocking attribute value %d", config->blocking));
  return make(comm, size, id, rank, !config || config->blocking != 0);
}

STANDIN_API int ncclCommFinalize(void* handle) {
  if (int code = entered(__func__)) return code;
  CommPointer comm = find_comm(handle);
  if (!comm) return no_comm(handle);
  if (int code = ensure_ready(*comm)) return code;
  if (comm->finalized) return failed(kInvalidArgument, "CommFinalize : the communicator has been finalized");
  comm->finalized = true;
  if (comm->blocking) return drained(*comm) ? kSuccess : kUnhandledCudaError;
  comm->error = kInProgress;
  ++comm->jobs;
  std::thread([comm] {
    usleep(1000);
    int result = drained(*comm) ? kSuccess : kUnhandledCudaError;
    int progress = kInProgress;
    comm->error.compare_exchange_strong(progress, result);
    --comm->jobs;
  }).detach();
  return kInProgress;
}

STANDIN_API int ncclCommDestroy(void* handle) {
  if (int code = entered(__func__)) return code;
  if (!handle) return kSuccess;
  CommPointer comm = find_comm(handle);
  if (!comm) return no_comm(handle);
  if (int code = ensure_ready(*comm)) return code;
  forget(handle);
  if (comm->blocking && !comm->finalized && !drained(*comm)) return kUnhandledCudaError;
  return kSuccess;
}

STANDIN_API int ncclCommAbort(void* handle) {
  if (int code = entered(__func__)) return code;
  if (!handle) return kSuccess;
  CommPointer comm = forget(handle);
  if (!comm) return no_comm(handle);
  comm->aborted = true;
  wake_turns();
  while (comm->running > 0 || comm->jobs > 0) usleep(200);  // what waits looks every 20 ms
  return kSuccess;
}

STANDIN_API int ncclCommGetAsyncError(void* handle, int* error) {
  if (int code = entered(__func__)) return code;
  CommPointer comm = find_comm(handle);
  if (!comm) return no_comm(handle);
  if (!error) return failed(kInvalidArgument, "asyncError argument is NULL");
  if (comm->error == kSuccess) comm->look_for_dead();
  *error = comm->error;
  return kSuccess;
}

template <class Get>
int attribute(void* handle, int* value, Get get) {
  CommPointer comm = find_comm(handle);
  if (!comm) return no_comm(handle);
  if (!value) return failed(kInvalidArgument, "argument is NULL");
  if (int code = ensure_ready(*comm)) return code;
  *value = get(*comm);
  return kSuccess;
}

STANDIN_API int ncclCommCount(void* comm, int* count) {
  if (int code = entered(__func__)) return code;
  return attribute(comm, count, [](const Comm& one) { return one.size; });
}

STANDIN_API int ncclCommUserRank(void* comm, int* rank) {
  if (int code = entered(__func__)) return code;
  return attribute(comm, rank, [](const Comm& one) { return one.rank; });
}

STANDIN_API int ncclCommCuDevice(void* comm, int* device) {
  if (int code = entered(__func__)) return code;
  return attribute(comm, device, [](const Comm& one) { return one.device; });
}

STANDIN_API const char* ncclGetErrorString(int code) {
  static const char* const kTexts[] = {
      "no error",
      "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
      "unhandled system error (run with NCCL_DEBUG=INFO for details)",
      "internal error - please report this issue to the NCCL developers",
      "invalid argument (run with NCCL_DEBUG=WARN for details)",
      "invalid usage (run with NCCL_DEBUG=WARN for details)",
      "remote process exited or there was a network error",
      "NCCL operation in progress",
  };
  return code >= 0 && code <= kInProgress ? kTexts[code] : "unknown result code";
}

STANDIN_API int standin_nccl_live(void) {
  std::lock_guard<std::mutex> guard(lock);
  return static_cast<int>(comms.size());
}
