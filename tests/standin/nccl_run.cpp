// Operations as they run in streams: like NCCL's kernels they hold the device and wait there for the other ranks.
#include <algorithm>
#include <chrono>
#include <cstring>

#include "nccl.h"

namespace standin {
namespace {

// Which operation of a device runs: one at a time. With STANDIN_NCCL_ORDER=launch they take turns in the order in which
// they were launched, so that ranks which launch in different orders always wait for each other in a ring. With "ready"
// whichever stream comes first takes the device, as it may be on a real one: programs that keep no order by events
// between their communicators' streams hang now and then.
class Turns {
 public:
  uint64_t launched(int device, const Comm* comm) {
    std::lock_guard<std::mutex> lock(lock_);
    waiting_[device].push_back({++tickets_, comm});
    return tickets_;
  }

  bool take(int device, uint64_t ticket, const Comm& comm) {
    std::unique_lock<std::mutex> lock(lock_);
    while (!mine(device, ticket)) {
      if (comm.stopped()) return false;
      changed_.wait_for(lock, std::chrono::milliseconds(20));
    }
    running_[device] = ticket;
    return true;
  }

  void done(int device, uint64_t ticket) {
    std::lock_guard<std::mutex> lock(lock_);
    auto& all = waiting_[device];
    all.erase(std::find_if(all.begin(), all.end(), [&](const Entry& entry) { return entry.ticket == ticket; }));
    if (running_[device] == ticket) running_[device] = 0;
    changed_.notify_all();
  }

  void wake() { changed_.notify_all(); }

 private:
  struct Entry {
    uint64_t ticket;
    const Comm* comm;
  };

  bool mine(int device, uint64_t ticket) {
    if (running_[device]) return false;
    const Comm* comm = nullptr;
    for (const Entry& entry : waiting_[device])
      if (entry.ticket == ticket) comm = entry.comm;
    for (const Entry& entry : waiting_[device])  // by ticket; those of one communicator keep their order in any case
      if (strict_ || entry.comm == comm) return entry.ticket == ticket;
    return false;
  }

  std::mutex lock_;
  std::condition_variable changed_;
  std::map<int, std::vector<Entry>> waiting_;
  std::map<int, uint64_t> running_;
  uint64_t tickets_ = 0;
  bool strict_ = [] {
    const char* text = std::getenv("STANDIN_NCCL_ORDER");
    return !text || std::strcmp(text, "ready") != 0;
  }();
};

Turns& turns() {
  static Turns* made = new Turns;
  return *made;
}

struct Task {
  CommPointer comm;
  std::vector<Operation> operations;
  uint64_t ticket;
};

bool is_message(const Operation& operation) { return operation.kind == kSend || operation.kind == kRecv; }

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

std::string describe(const Description& one) {
  return std::string(name(one.kind)) + " of " + std::to_string(one.count) + " elements of dtype " +
         std::to_string(one.type) + ", op " + std::to_string(one.op) + ", root " + std::to_string(one.root);
}

bool same(const Description& a, const Description& b) {
  return a.kind == b.kind && a.type == b.type && a.op == b.op && a.root == b.root && a.count == b.count;
}

// One collective on one rank.
class Collective {
 public:
  Collective(Comm& comm, const Operation& operation)
      : comm_(comm),
        meeting_(*comm.meeting),
        operation_(operation),
        unit_(size_of(operation.type)),
        send_(static_cast<char*>(cuda().alias(operation.send))),
        receive_(static_cast<char*>(cuda().alias(operation.receive))) {}

  void run() {
    if (!agreed()) return;
    size_t parts = operation_.kind == kReduceScatter ? static_cast<size_t>(comm_.size) : 1;
    size_t most = kStageBytes / unit_ / parts;
    for (size_t begin = 0; begin < operation_.count; begin += most) {
      size_t count = std::min(most, operation_.count - begin);
      show(begin, count);
      if (!barrier()) return;
      take(begin, count);
      if (!barrier()) return;
    }
  }

 private:
  bool barrier() {
    return meeting_.barrier([&](const std::function<bool()>& condition) { return comm_.wait(condition); });
  }

  bool agreed() {
    const Reduction& reduction = operation_.reduction;
    double scalar = reduction.scalar;
    if (reduction.on_device) scalar = read_scalar(cuda().alias(reduction.on_device), reduction.scalar_type);
    int turn = turn_++ % 2;
    meeting_.seat(comm_.rank).operations[turn] = {operation_.kind, operation_.type,  reduction.op,
                                                  operation_.root, operation_.count, scalar};
    if (!barrier()) return false;
    const Description& mine = meeting_.seat(comm_.rank).operations[turn];
    for (int rank = 0; rank < comm_.size; ++rank) {
      const Description& theirs = meeting_.seat(rank).operations[turn];
      scalars_.push_back(theirs.scalar);
      if (same(mine, theirs)) continue;
      violation(comm_, describe(mine) + " meets rank " + std::to_string(rank) + "'s " + describe(theirs));
      return false;
    }
    return true;
  }

  void show(size_t begin, size_t count) {
    char* stage = meeting_.stage(comm_.rank);
    if (operation_.kind == kBroadcast && comm_.rank != operation_.root) return;
    if (operation_.kind != kReduceScatter) {
      std::memcpy(stage, send_ + begin * unit_, count * unit_);
      return;
    }
    for (int part = 0; part < comm_.size; ++part)
      std::memcpy(stage + part * count * unit_, send_ + (part * operation_.count + begin) * unit_, count * unit_);
  }

  void take(size_t begin, size_t count) {
    char* to = receive_ + begin * unit_;
    std::vector<const void*> stages;
    size_t part = operation_.kind == kReduceScatter ? comm_.rank * count * unit_ : 0;
    for (int rank = 0; rank < comm_.size; ++rank) stages.push_back(meeting_.stage(rank) + part);
    switch (operation_.kind) {
      case kBroadcast:
        std::memcpy(to, stages[operation_.root], count * unit_);
        break;
      case kAllGather:
        for (int rank = 0; rank < comm_.size; ++rank)
          std::memcpy(to + rank * operation_.count * unit_, stages[rank], count * unit_);
        break;
      default:
        if (operation_.kind != kReduce || comm_.rank == operation_.root)
          reduce(operation_.type, operation_.reduction.op, stages, scalars_, to, count);
    }
  }

  Comm& comm_;
  Meeting& meeting_;
  const Operation& operation_;
  size_t unit_;
  char* send_;
  char* receive_;
  std::vector<double> scalars_;
  uint64_t& turn_ = comm_.collectives;
};

// The sends and receives of one group: all go on at once, those with the same peer one after the other.
class Messages {
 public:
  Messages(Comm& comm, const std::vector<Operation>& operations) : comm_(comm), meeting_(*comm.meeting) {
    for (const Operation& operation : operations) {
      const void* buffer = operation.kind == kSend ? operation.send : operation.receive;
      auto& queue = operation.kind == kSend ? sends_[operation.root] : receives_[operation.root];
      queue.push_back({static_cast<char*>(cuda().alias(buffer)), operation.count * size_of(operation.type), 0,
                       operation.type, false});
    }
  }

  void run() {
    while (!sends_.empty() || !receives_.empty()) {
      bool moved = false;
      if (!comm_.wait([&] {
            moved = step();
            return moved || broken_;
          }) ||
          broken_)
        return;
      meeting_.ring();
    }
  }

 private:
  struct Message {
    char* buffer;
    uint64_t bytes;
    uint64_t done;
    Type type;
    bool begun;
  };
  using Queues = std::map<int, std::vector<Message>>;

  bool step() {
    bool moved = false;
    for (auto queue = sends_.begin(); queue != sends_.end();) {
      moved |= send(queue->first, queue->second.front()) && pop(queue->second);
      queue = queue->second.empty() ? sends_.erase(queue) : std::next(queue);
    }
    for (auto queue = receives_.begin(); queue != receives_.end();) {
      moved |= receive(queue->first, queue->second.front()) && pop(queue->second);
      queue = queue->second.empty() ? receives_.erase(queue) : std::next(queue);
    }
    bool progress = moved || progress_;
    progress_ = false;
    return progress;
  }

  static bool pop(std::vector<Message>& queue) {
    queue.erase(queue.begin());
    return true;
  }

  // True when the whole message was taken by the receiver.
  bool send(int peer, Message& message) {
    Channel& channel = meeting_.channel(comm_.rank, peer);
    if (channel.broken) {
      comm_.fail(kInvalidUsage);
      broken_ = true;
      return false;
    }
    if (channel.full) return false;
    if (message.begun && message.done == message.bytes) return true;
    channel.type = message.type;
    channel.total = message.bytes;
    channel.bytes = std::min<uint64_t>(kChannelBytes, message.bytes - message.done);
    std::memcpy(meeting_.channel_data(comm_.rank, peer), message.buffer + message.done, channel.bytes);
    message.done += channel.bytes;
    message.begun = true;
    channel.full = 1;
    progress_ = true;
    return false;
  }

  bool receive(int peer, Message& message) {
    Channel& channel = meeting_.channel(peer, comm_.rank);
    if (!channel.full) return false;
    if (channel.total != message.bytes || channel.type != message.type) {
      violation(comm_, "Recv of " + std::to_string(message.bytes) + " bytes of dtype " + std::to_string(message.type) +
                           " meets rank " + std::to_string(peer) + "'s Send of " + std::to_string(channel.total) +
                           " bytes of dtype " + std::to_string(channel.type));
      channel.broken = 1;
      meeting_.ring();
      broken_ = true;
      return false;
    }
    std::memcpy(message.buffer + message.done, meeting_.channel_data(peer, comm_.rank), channel.bytes);
    message.done += channel.bytes;
    channel.full = 0;
    progress_ = true;
    return message.done == message.bytes;
  }

  Comm& comm_;
  Meeting& meeting_;
  Queues sends_, receives_;
  bool progress_ = false;
  bool broken_ = false;
};

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
      Collective(comm, operation).run();
  }
  if (!comm.stopped() && !messages.empty()) Messages(comm, messages).run();
}

int run(void* argument) {
  std::unique_ptr<Task> task(static_cast<Task*>(argument));
  Comm& comm = *task->comm;
  ++comm.running;
  if (turns().take(comm.device, task->ticket, comm) && comm.error != kInvalidUsage) work(*task);
  turns().done(comm.device, task->ticket);
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
  auto* task = new Task{comm, std::move(operations), turns().launched(comm->device, comm.get())};
  uint64_t ticket = task->ticket;
  ++comm->queued;
  comm->launched = true;
  int error = cuda().enqueue(comm->device, first, run, task);
  if (error != 0) {
    delete task;
    turns().done(comm->device, ticket);
    --comm->queued;
    return failed(kUnhandledCudaError, "Cuda failure %d", error);
  }
  for (void* other : streams)
    if (other != first) cuda().order(comm->device, first, other);
  return kSuccess;
}

}  // namespace

void wake_turns() { turns().wake(); }

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
  static const long remote = setting("STANDIN_NCCL_REMOTE_ERROR", 0);
  if (!remote || meeting->dead_rank() < 0) return;
  fail(remote == 1 ? static_cast<int>(kRemoteError) : static_cast<int>(remote));
}

}  // namespace standin
