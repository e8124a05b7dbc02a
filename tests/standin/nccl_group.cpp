// Groups, as NCCL has them: nested per thread, and nothing happens before the outermost end.
#include <unistd.h>

#include <algorithm>
#include <random>
#include <thread>

#include "nccl.h"

namespace standin {
namespace {

struct Initialization {
  CommPointer comm;
  std::function<int()> run;
};

struct Group {
  int depth = 0;
  int error = kSuccess;
  std::vector<Initialization> initializations;
  std::vector<Call> calls;
};

thread_local Group group;

void finish(const CommPointer& comm, int result) {
  if (result != kSuccess) {
    comm->error = result;
  } else {
    int progress = kInProgress;
    comm->error.compare_exchange_strong(progress, kSuccess);
  }
  --comm->jobs;
}

// Each on a thread of its own, since ranks of one process wait for each other.
int initialize(std::vector<Initialization> all) {
  std::vector<std::thread> threads;
  std::vector<int> results(all.size());
  bool blocking = all[0].comm->blocking;
  for (size_t index = 0; index < all.size(); ++index) {
    ++all[index].comm->jobs;
    Initialization one = all[index];
    if (blocking) {
      threads.emplace_back([one, &results, index] { finish(one.comm, results[index] = one.run()); });
    } else {
      one.comm->error = kInProgress;
      std::thread([one] { finish(one.comm, one.run()); }).detach();
    }
  }
  for (std::thread& thread : threads) thread.join();
  if (!blocking) return kInProgress;
  for (int result : results)
    if (result != kSuccess) return result;
  return kSuccess;
}

// Whether a launch without blocking takes its time: the first of a communicator does, since it connects.
bool later(const std::vector<CommPointer>& comms) {
  static std::mutex lock;
  static std::mt19937 random(static_cast<unsigned>(setting("STANDIN_SEED", 0)));
  static const long percent = setting("STANDIN_NCCL_IN_PROGRESS", 25);
  for (const CommPointer& comm : comms)
    if (!comm->launched) return percent > 0;
  std::lock_guard<std::mutex> guard(lock);
  return static_cast<long>(random() % 100) < percent;
}

int launch_group(const std::vector<Call>& calls) {
  std::vector<CommPointer> comms;
  for (const Call& call : calls)
    if (std::find(comms.begin(), comms.end(), call.comm) == comms.end()) comms.push_back(call.comm);
  if (comms[0]->blocking || !later(comms)) return launch(calls);
  for (const CommPointer& comm : comms) {
    comm->error = kInProgress;
    ++comm->jobs;
  }
  std::thread([calls, comms] {
    usleep(static_cast<useconds_t>(setting("STANDIN_NCCL_LAUNCH_US", 2000)));
    int result = launch(calls);
    for (const CommPointer& comm : comms) finish(comm, result);
  }).detach();
  return kInProgress;
}

bool mixed(const Group& ended) {
  bool any = false, all = true;
  for (const Initialization& one : ended.initializations) any |= one.comm->blocking, all &= one.comm->blocking;
  for (const Call& call : ended.calls) any |= call.comm->blocking, all &= call.comm->blocking;
  return any && !all;
}

}  // namespace

int group_start() {
  ++group.depth;
  return kSuccess;
}

int group_end() {
  if (group.depth == 0) return failed(kInvalidUsage, "ncclGroupEnd: not in a group call.");
  if (--group.depth > 0) return kSuccess;
  Group ended = std::move(group);
  group = Group();
  if (ended.error != kSuccess) return ended.error;
  if (mixed(ended)) return failed(kInvalidArgument, "Blocking and nonblocking communicators are in the same group");
  int result = kSuccess;
  if (!ended.initializations.empty()) result = initialize(std::move(ended.initializations));
  if (!ended.calls.empty() && result == kSuccess) result = launch_group(ended.calls);
  return result;
}

int add_initialization(const CommPointer& comm, std::function<int()> run) {
  group_start();
  group.initializations.push_back({comm, std::move(run)});
  return group_end();
}

int add_call(Call call) {
  group_start();
  group.calls.push_back(std::move(call));
  return group_end();
}

int group_fail(int code) {
  if (group.depth > 0 && code != kSuccess && group.error == kSuccess) group.error = code;
  return code;
}

}  // namespace standin
