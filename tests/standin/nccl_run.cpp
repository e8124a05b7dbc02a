// Operations as they run in streams: like NCCL's kernels they hold the device and wait there for the other ranks.
#include <algorithm>

#include "nccl.h"

namespace standin {

const char* name(int kind) {
  static const char* const kNames[] = {"AllReduce",     "Reduce", "Broadcast", "AllGather",
                                       "ReduceScatter", "Send",   "Recv"};
  return kNames[kind];
}

void violation(Comm& comm, const std::string& text) {
  cuda().violate(
      ("NCCL, rank " + std::to_string(comm.rank) + " of " + std::to_string(comm.size) + ": " + text).c_str());
  comm.fail(kInvalidUsage);
}

namespace {

std::atomic<int>& remote_error() {  // what the death of a rank becomes; 0: nothing, the others wait
  static std::atomic<int> code{static_cast<int>(setting("STANDIN_NCCL_REMOTE_ERROR", 0))};
  return code;
}

struct Task {
  CommPointer comm;
  std::vector<Operation> operations;
  uint64_t ticket;
};

bool is_message(const Operation& operation) { return operation.kind == kSend || operation.kind == kRecv; }

// Planted failures of operations; false if the operation is not to be done.
bool struck(Comm& comm) {
  if (int code = plant_of("async")) {
    comm.fail(code);
    comm.wait([] { return false; });
    return false;
  }
  if (plant_of("hang")) {
    unsigned long before = hangs_resumed();
    return comm.wait([&] { return hangs_resumed() != before; });
  }
  return true;
}

void work(Task& task) {
  Comm& comm = *task.comm;
  std::vector<Operation> messages;
  for (const Operation& operation : task.operations) {
    if (comm.stopped() || !struck(comm)) return;
    if (is_message(operation))
      messages.push_back(operation);
    else
      run_collective(comm, operation);
  }
  if (!comm.stopped() && !messages.empty()) run_messages(comm, messages);
}

int run(void* argument) {
  std::unique_ptr<Task> task(static_cast<Task*>(argument));
  Comm& comm = *task->comm;
  ++comm.running;
  if (turn_take(comm, task->ticket) && comm.error != kInvalidUsage) work(*task);
  turn_done(comm, task->ticket);
  int lost = cuda().device_error(comm.device);
  --comm.running;
  --comm.queued;
  return lost;
}

// What NCCL would notice only by a crash of its kernel, or not at all.
int check(const Comm& comm, const Operation& operation, const void* buffer, size_t count, const char* what) {
  int device = cuda().device_of(buffer);
  size_t bytes = count * size_of(operation.type);
  if (device != comm.device && device != -1)
    return failed(kInvalidArgument, "%s : %s %p is not a pointer to memory of device %d", name(operation.kind), what,
                  buffer, comm.device);
  if (cuda().extent(buffer) < bytes)
    return failed(kInvalidArgument, "%s : %s %p has %zu bytes, %zu are needed", name(operation.kind), what, buffer,
                  cuda().extent(buffer), bytes);
  return kSuccess;
}

int check(const Comm& comm, const Operation& operation) {
  size_t count = operation.count, all = count * static_cast<size_t>(comm.size);
  bool root = comm.rank == operation.root;
  bool sends = operation.kind != kRecv && (operation.kind != kBroadcast || root);
  bool receives = operation.kind != kSend && (operation.kind != kReduce || root);
  int result = kSuccess;
  if (sends)
    result = check(comm, operation, operation.send, operation.kind == kReduceScatter ? all : count, "sendbuff");
  if (result == kSuccess && receives)
    result = check(comm, operation, operation.receive, operation.kind == kAllGather ? all : count, "recvbuff");
  int device = cuda().stream_device(operation.stream);
  if (result == kSuccess && device != comm.device && device != -1)
    return failed(kUnhandledCudaError, "Cuda failure 400 'invalid resource handle'");
  return result;
}

int launch_one(const CommPointer& comm, std::vector<Operation> operations) {
  static std::mutex lock;  // turns and places in streams are in one order
  std::lock_guard<std::mutex> guard(lock);
  if (comm->aborted) return kSuccess;
  std::vector<void*> streams;
  for (const Operation& operation : operations) {
    int result = check(*comm, operation);
    if (result != kSuccess) return result;
    if (std::find(streams.begin(), streams.end(), operation.stream) == streams.end())
      streams.push_back(operation.stream);
  }
  void* first = streams[0];
  for (void* other : streams)
    if (other != first) cuda().order(comm->device, other, first);
  auto* task = new Task{comm, std::move(operations), turn_launched(*comm)};
  uint64_t ticket = task->ticket;
  ++comm->queued;
  comm->launched = true;
  int error = cuda().enqueue(comm->device, first, run, task);
  if (error != 0) {
    delete task;
    turn_done(*comm, ticket);
    --comm->queued;
    return failed(kUnhandledCudaError, "Cuda failure %d", error);
  }
  for (void* other : streams)
    if (other != first) cuda().order(comm->device, first, other);
  return kSuccess;
}

}  // namespace

int launch(const std::vector<Call>& calls) {
  std::vector<CommPointer> comms;
  for (const Call& call : calls)
    if (std::find(comms.begin(), comms.end(), call.comm) == comms.end()) comms.push_back(call.comm);
  int result = kSuccess;
  for (const CommPointer& comm : comms) {
    std::vector<Operation> operations;
    for (const Call& call : calls)
      if (call.comm == comm) operations.push_back(call.operation);
    int one = launch_one(comm, std::move(operations));
    if (result == kSuccess) result = one;
  }
  return result;
}

bool Comm::stopped() const { return aborted || cuda().device_error(device) != 0; }

void Comm::fail(int code) {
  int none = kSuccess;
  error.compare_exchange_strong(none, code);
}

bool Comm::wait(const std::function<bool()>& condition) {
  while (true) {
    uint32_t bell = meeting->bell();
    if (condition()) return true;
    if (stopped()) return false;
    look_for_dead();
    meeting->sleep(bell);
  }
}

void Comm::look_for_dead() {
  const int code = remote_error();
  if (code == 0 || meeting->dead_rank() < 0) return;
  fail(code == 1 ? static_cast<int>(kRemoteError) : code);
}

}  // namespace standin

STANDIN_API void standin_nccl_remote_error(int code) { standin::remote_error() = code; }
