// Stand-in for libnccl: communicators of processes of one machine. No header of NCCL's is used; the names, prototypes
// and numbers are those of its C interface, 2.14 to 2.27.
#include "nccl.h"

#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <climits>
#include <cmath>
#include <cstdarg>
#include <cstring>
#include <thread>

namespace standin {
namespace {

std::mutex lock;  // of all below
std::map<std::string, long>& calls = *new std::map<std::string, long>;
std::vector<Plant>& plants = *new std::vector<Plant>(planted("STANDIN_NCCL_PLANT"));
std::map<void*, CommPointer>& comms = *new std::map<void*, CommPointer>;
std::string& error_text = *new std::string;
std::atomic<unsigned long> resumed{0};

// The stand-in for libcudart may have been loaded with RTLD_LOCAL, where RTLD_DEFAULT does not find it.
void* find_cuda() {
  if (dlsym(RTLD_DEFAULT, "standin_enqueue")) return RTLD_DEFAULT;
  std::vector<std::string> loaded;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* names) {
        static_cast<std::vector<std::string>*>(names)->push_back(info->dlpi_name);
        return 0;
      },
      &loaded);
  for (const std::string& name : loaded) {
    if (name.empty()) continue;
    void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (library && dlsym(library, "standin_enqueue")) return library;
    if (library) dlclose(library);
  }
  const char* file = std::getenv("STANDIN_CUDART");
  void* library = dlopen(file ? file : "libcudart.so.12", RTLD_NOW);
  if (!library || !dlsym(library, "standin_enqueue")) {
    std::fprintf(stderr, "stand-in for libnccl: there is no stand-in for libcudart (STANDIN_CUDART)\n");
    std::abort();
  }
  return library;
}

template <class Function>
void find(void* library, Function& function, const char* name) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (!function) std::abort();
}

CommPointer find_comm(void* handle) {
  std::lock_guard<std::mutex> guard(lock);
  auto found = comms.find(handle);
  return found == comms.end() ? nullptr : found->second;
}

CommPointer forget(void* handle) {
  std::lock_guard<std::mutex> guard(lock);
  auto found = comms.find(handle);
  if (found == comms.end()) return nullptr;
  CommPointer comm = found->second;
  comms.erase(found);
  return comm;
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

int enqueue(const char* function, void* handle, Operation operation, int type, int op) {
  int planted = entered(function);
  if (planted != kSuccess) return group_fail(planted);
  CommPointer comm = find_comm(handle);
  if (!comm) return group_fail(no_comm(handle));
  int result = ensure_ready(*comm);
  if (result != kSuccess) return group_fail(result);
  if (comm->finalized) return group_fail(failed(kInvalidUsage, "%s : the communicator has been finalized", function));
  if (type < 0 || type >= kTypes) return group_fail(failed(kInvalidArgument, "%s : invalid type %d", function, type));
  if (operation.root < 0 || operation.root >= comm->size)
    return group_fail(failed(kInvalidArgument, "%s : invalid root %d (root should be in the 0..%d range)", function,
                             operation.root, comm->size));
  operation.type = static_cast<Type>(type);
  if (op >= 0 && op < kPreMulSum) {
    operation.reduction.op = static_cast<Op>(op);
  } else {
    size_t index = static_cast<size_t>(op - kPreMulSum);
    if (op < 0 || index >= comm->scalars.size() || !comm->scalars[index].used)
      return group_fail(failed(kInvalidArgument, "%s : invalid reduction operation %d", function, op));
    const Scalar& scalar = comm->scalars[index];
    if (scalar.type != operation.type)
      return group_fail(failed(kInvalidArgument, "%s : reduction operation %d is of another type", function, op));
    operation.reduction = {kPreMulSum, scalar.value, scalar.on_device, scalar.type};
  }
  bool message = operation.kind == kSend || operation.kind == kRecv;
  if (operation.count == 0 && !message) return kSuccess;
  return add_call({comm, operation});
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

const Cuda& cuda() {
  static const Cuda found = [] {
    void* library = find_cuda();
    Cuda functions;
    find(library, functions.enqueue, "standin_enqueue");
    find(library, functions.order, "standin_order");
    find(library, functions.alias, "standin_alias");
    find(library, functions.device_of, "standin_device_of");
    find(library, functions.extent, "standin_extent");
    find(library, functions.stream_device, "standin_stream_device");
    find(library, functions.current_device, "standin_current_device");
    find(library, functions.bus_id, "standin_bus_id");
    find(library, functions.device_error, "standin_device_error");
    find(library, functions.violate, "standin_violate");
    return functions;
  }();
  return found;
}

int failed(int code, const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  std::lock_guard<std::mutex> guard(lock);
  error_text = text;
  return code;
}

int plant_of(const char* function) {
  std::lock_guard<std::mutex> guard(lock);
  long call = ++calls[function];
  for (const Plant& plant : plants)
    if (plant.function == function && plant.nth == call) return plant.code;
  return kSuccess;
}

int entered(const char* function) {
  int code = plant_of(function);
  return code == kSuccess ? code : failed(code, "%s : planted failure", function);
}

unsigned long hangs_resumed() { return resumed; }

}  // namespace standin

using namespace standin;

STANDIN_API int ncclGetVersion(int* version) {
  if (int code = entered(__func__)) return code;
  if (!version) return kInvalidArgument;
  *version = static_cast<int>(setting("STANDIN_NCCL_VERSION", 22304));
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

STANDIN_API const char* ncclGetLastError(void*) {
  static thread_local std::string kept;
  std::lock_guard<std::mutex> guard(lock);
  kept = error_text;
  return kept.c_str();
}

STANDIN_API int ncclAllReduce(const void* send, void* receive, size_t count, int type, int op, void* comm,
                              void* stream) {
  return enqueue(__func__, comm, {kAllReduce, send, receive, count, {}, {}, 0, stream}, type, op);
}

STANDIN_API int ncclReduce(const void* send, void* receive, size_t count, int type, int op, int root, void* comm,
                           void* stream) {
  return enqueue(__func__, comm, {kReduce, send, receive, count, {}, {}, root, stream}, type, op);
}

STANDIN_API int ncclBroadcast(const void* send, void* receive, size_t count, int type, int root, void* comm,
                              void* stream) {
  return enqueue(__func__, comm, {kBroadcast, send, receive, count, {}, {}, root, stream}, type, kSum);
}

STANDIN_API int ncclAllGather(const void* send, void* receive, size_t count, int type, void* comm, void* stream) {
  return enqueue(__func__, comm, {kAllGather, send, receive, count, {}, {}, 0, stream}, type, kSum);
}

STANDIN_API int ncclReduceScatter(const void* send, void* receive, size_t count, int type, int op, void* comm,
                                  void* stream) {
  return enqueue(__func__, comm, {kReduceScatter, send, receive, count, {}, {}, 0, stream}, type, op);
}

STANDIN_API int ncclSend(const void* send, size_t count, int type, int peer, void* comm, void* stream) {
  return enqueue(__func__, comm, {kSend, send, nullptr, count, {}, {}, peer, stream}, type, kSum);
}

STANDIN_API int ncclRecv(void* receive, size_t count, int type, int peer, void* comm, void* stream) {
  return enqueue(__func__, comm, {kRecv, nullptr, receive, count, {}, {}, peer, stream}, type, kSum);
}

STANDIN_API int ncclGroupStart(void) {
  if (int code = entered(__func__)) return code;
  return group_start();
}

STANDIN_API int ncclGroupEnd(void) {
  int code = entered(__func__);
  if (code != kSuccess) group_fail(code);  // nothing of the group is done
  return group_end();
}

STANDIN_API int ncclRedOpCreatePreMulSum(int* op, void* scalar, int type, int residence, void* handle) {
  if (int code = entered(__func__)) return code;
  CommPointer comm = find_comm(handle);
  if (!comm) return no_comm(handle);
  if (int code = ensure_ready(*comm)) return code;
  if (!op || !scalar || type < 0 || type >= kTypes || (residence != 0 && residence != 1))
    return failed(kInvalidArgument, "RedOpCreatePreMulSum : invalid argument");
  Scalar made;
  made.used = true;
  made.type = static_cast<Type>(type);
  if (residence == 1)
    made.value = read_scalar(scalar, made.type);
  else
    made.on_device = scalar;
  size_t index = 0;
  while (index < comm->scalars.size() && comm->scalars[index].used) ++index;
  if (index == comm->scalars.size()) comm->scalars.emplace_back();
  comm->scalars[index] = made;
  *op = kPreMulSum + static_cast<int>(index);
  return kSuccess;
}

STANDIN_API int ncclRedOpDestroy(int op, void* handle) {
  if (int code = entered(__func__)) return code;
  CommPointer comm = find_comm(handle);
  if (!comm) return no_comm(handle);
  size_t index = static_cast<size_t>(op - kPreMulSum);
  if (op < kPreMulSum) return failed(kInvalidArgument, "ncclRedOpDestroy : operator is a NCCL builtin.");
  if (index >= comm->scalars.size() || !comm->scalars[index].used)
    return failed(kInvalidArgument, "ncclRedOpDestroy : operator unknown to this communicator");
  comm->scalars[index].used = false;
  return kSuccess;
}

STANDIN_API void standin_nccl_plant(const char* function, int nth, int code) {
  std::lock_guard<std::mutex> guard(lock);
  plants.push_back({function, calls[function] + nth, code, false});
}

STANDIN_API void standin_nccl_resume(void) { ++resumed; }

STANDIN_API long standin_nccl_calls(const char* function) {
  std::lock_guard<std::mutex> guard(lock);
  return calls[function];
}

STANDIN_API int standin_nccl_live(void) {
  std::lock_guard<std::mutex> guard(lock);
  return static_cast<int>(comms.size());
}
