// Inside of the stand-in for libnccl, and what it offers to tests beside NCCL's own functions.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "nccl_meeting.h"
#include "nccl_types.h"
#include "settings.h"
#include "standin.h"

// Let the `nth` call from now of a function of NCCL's return `code`. Two names are not functions but operations, as
// they run: "async" raises `code` at the communicator and hangs until it is aborted; "hang" hangs until
// standin_nccl_resume.
STANDIN_API void standin_nccl_plant(const char* function, int nth, int code);
STANDIN_API void standin_nccl_resume(void);
STANDIN_API long standin_nccl_calls(const char* function);
// From now on in the place of STANDIN_NCCL_REMOTE_ERROR.
STANDIN_API void standin_nccl_remote_error(int code);
// Communicators that were made and neither destroyed nor aborted.
STANDIN_API int standin_nccl_live(void);

namespace standin {

// The other stand-in, wherever the process has loaded it from.
struct Cuda {
  decltype(&standin_enqueue) enqueue;
  decltype(&standin_order) order;
  decltype(&standin_alias) alias;
  decltype(&standin_device_of) device_of;
  decltype(&standin_extent) extent;
  decltype(&standin_stream_device) stream_device;
  decltype(&standin_current_device) current_device;
  decltype(&standin_bus_id) bus_id;
  decltype(&standin_device_error) device_error;
  decltype(&standin_violate) violate;
};

const Cuda& cuda();

enum Kind : int { kAllReduce, kReduce, kBroadcast, kAllGather, kReduceScatter, kSend, kRecv };

struct Operation {
  Kind kind = kAllReduce;
  const void* send = nullptr;
  void* receive = nullptr;
  size_t count = 0;
  Type type = kFloat32;
  Reduction reduction;
  int root = 0;  // or the peer
  void* stream = nullptr;
};

struct Scalar {  // what ncclRedOpCreatePreMulSum made
  bool used = false;
  double value = 1;
  const void* on_device = nullptr;
  Type type = kFloat32;
};

struct Comm {
  int rank = 0;
  int size = 0;
  int device = 0;
  bool blocking = true;
  bool finalized = false;
  std::atomic<bool> aborted{false};
  std::atomic<int> error{kSuccess};  // what ncclCommGetAsyncError tells; kInProgress too
  std::atomic<int> jobs{0};          // threads that initialize, launch or finalize
  std::atomic<int> queued{0};        // operations in streams
  std::atomic<int> running{0};       // of these, at work
  std::atomic<bool> launched{false};
  std::unique_ptr<Meeting> meeting;
  uint64_t collectives = 0;  // that ran
  std::vector<Scalar> scalars;

  // Wait for a condition that other ranks bring about; false if the communicator is aborted or its device lost.
  bool wait(const std::function<bool()>& condition);
  bool stopped() const;
  void fail(int code);  // the first error stays
  void look_for_dead();
};

using CommPointer = std::shared_ptr<Comm>;

struct Call {
  CommPointer comm;
  Operation operation;
};

// Put operations of one group into their streams, those of a communicator as one.
int launch(const std::vector<Call>& calls);

// Inside of an operation.
void run_collective(Comm& comm, const Operation& operation);
void run_messages(Comm& comm, const std::vector<Operation>& operations);
const char* name(int kind);
inline int version() { return static_cast<int>(setting("STANDIN_NCCL_VERSION", 22304)); }
void violation(Comm& comm, const std::string& text);

// Turns at a device.
uint64_t turn_launched(const Comm& comm);
bool turn_take(const Comm& comm, uint64_t ticket);  // false if the communicator was stopped
void turn_done(const Comm& comm, uint64_t ticket);
void wake_turns();

// Communicators by their handles.
CommPointer find_comm(void* handle);
int no_comm(void* handle);
int ensure_ready(const Comm& comm);

// Groups, which every call is one of.
int group_start();
int group_end();
int add_initialization(const CommPointer& comm, std::function<int()> initialize);
int add_call(Call call);
int group_fail(int code);  // inside of a group an error is told again at its end, and nothing of it is done

// The frame of NCCL's functions: counts, and gives planted failures.
int entered(const char* function);
int plant_of(const char* function);
int failed(int code, const char* format, ...) __attribute__((format(printf, 2, 3)));
unsigned long hangs_resumed();

}  // namespace standin
