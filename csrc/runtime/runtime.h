// Runs requests from post() to done: the share is copied into a slot, the part arrives in the host's table, the
// transport works, the result is copied out. A small request of the rank that arrives last runs on the thread that
// posts it. Everything else runs on the runtime's thread, or on a thread that waits for a request and stands in for it.
// Only these threads wait for other ranks.
//
//   post() -> Requests -> Sender -> Parts, DeviceParts -> table, transports -> PartEvents -> Parts, DeviceParts
//
// Locks: the mutex of Requests guards requests and parts. Turns, ThreadCommands, DeviceParts and TimelineNotes have a
// mutex each for their own members. leave(), and a question to other hosts (ThreadCommands), take a lock before all
// other locks. The table's lock is taken before the mutex of Requests. A thread that holds one of the other locks takes
// no further lock.
#pragma once

#include <mpi.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/forks.h"
#include "runtime/context.h"
#include "runtime/late_ranks.h"
#include "runtime/parts.h"
#include "runtime/requests.h"
#include "runtime/runtime_thread.h"
#include "runtime/send_queue.h"
#include "runtime/spin_policy.h"
#include "runtime/thread_commands.h"
#include "runtime/timeline_notes.h"
#include "runtime/turns.h"

namespace mykv {

namespace testing {
struct RuntimeAccess;  // csrc/testing/live.cpp
}

class Runtime : public std::enable_shared_from_this<Runtime> {
 public:
  Runtime(MPI_Comm comm, const RuntimeOptions& options);
  // In an existing world; options.world is ignored.
  Runtime(std::unique_ptr<World> world, const RuntimeOptions& options);
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;
  ~Runtime();

  // Takes the next turn under `name`. Call it in the order of the program's calls.
  // In a fork the result is meaningless: post() fails.
  uint64_t take_turn(const std::string& name) { return forked() ? 0 : turns_.take(name); }
  // The next number in the order of the program's calls, for one request.
  std::shared_ptr<const Ticket> take_ticket();
  // The last turn of `name`. A second operation that belongs to the first, under another name, has the same turn: a
  // counter for the second name would fall behind on a rank that failed between the two operations.
  uint64_t last_turn(const std::string& name) { return forked() ? 0 : turns_.last(name); }
  // Drops the turn counters of all names that begin with `prefix`, and the residuals of their compression. No rank may
  // use such a name again: keys would repeat, and other ranks may still have an old operation with the same key.
  void forget(const std::string& prefix);
  // The number of names that have turn counters.
  size_t counted_names() {
    require_own_process();
    return turns_.names();
  }
  // Returns at once; with Request::may_linger, after at most 20 us. If nothing else is under way, this thread may end a
  // small request itself, which saves waking the runtime's thread and then the thread that waits for the result. The
  // request's buffers must stay valid until done was called.
  void post(Request request);
  // Refuses the operation of a name and turn: its ranks get an error with the reason.
  void refuse(std::string name, uint64_t turn, const std::string& reason);
  // This rank's part of the host's segment, for requests in place.
  Region& region() {
    require_own_process();
    return context_.region;
  }
  // For a thread that waits for a request of this runtime, see RuntimeThread.
  bool may_stand_in() const { return work_.may_stand_in(); }
  void stand_in(const std::function<bool()>& over, int64_t until_ns) {
    if (!forked()) work_.stand_in(over, until_ns);
  }
  // Tells the other ranks that this rank leaves, ends its own pending requests with the reason, and stops the thread.
  void leave(std::string reason);
  // Whether leave() was called.
  bool left() const { return commands_.leaving(); }
  // Whether this process is a fork of the process that created the runtime. A fork has no runtime's thread and
  // runs no operations. It must not take a lock, since another thread of the parent may have held the lock during the
  // fork.
  bool forked() const { return fork_number() != forks_; }
  // Throws Error in a fork. Call it before taking any lock.
  void require_own_process() const;

  const World& world() const { return context_.world; }
  const RuntimeOptions& options() const { return context_.options; }
  const gpu::GpuRoads& gpus() const { return context_.gpus; }
  const Agreement& agreement() const { return context_.agreement; }
  const Transport& transport() const { return *context_.transport; }

  // See LateRanks. Thread-safe.
  double longest_wait() { return forked() ? 0 : late_ranks_.longest_wait(); }
  std::vector<Waiting> waiting(double least_seconds, const std::string& name) {
    require_own_process();
    return late_ranks_.waiting(least_seconds, name);
  }
  std::vector<std::vector<int>> waiting_for_this(const std::vector<std::string>& names, const std::string& turn_of) {
    require_own_process();
    return late_ranks_.waiting_for_this(names, turn_of);
  }
  // Ends the operations under these names that some rank has not arrived at, with an error on all ranks, including
  // ranks that arrive later. Does not end operations at which all ranks have arrived, nor operations in which this rank
  // has waited for less than `least_seconds`.
  void give_up(const std::unordered_map<std::string, Failure>& reasons, double least_seconds = 0);
  // Ends this rank's runtime and its operations with this reason: for a rank that has arrived and cannot continue.
  void break_down(const Failure& reason);
  // Ends the use of the host's table, whose lock a rank does not release: all ranks of the host end their operations.
  void give_verdict(const std::string& reason);
  // A process of this world has died: this rank ends all its operations with this reason, and never frees
  // communicators, which all ranks would have to free together.
  void lose(const Failure& reason);
  // Whether a failure detector calls lose() soon after a process has died. If so, a rank that fails waits for this
  // call, so that its error can name the dead process. One flag for all runtimes of this process; thread-safe.
  static std::atomic<bool>& watched() { return ThreadCommands::watched(); }
  // For the statistics. Thread-safe.
  Totals totals() {
    require_own_process();
    return requests_.totals();
  }
  // How late ranks were. With several hosts, rank 0 covers all ranks, other ranks only their own host.
  std::vector<LateRank> late_ranks();
  // A message about this rank's GPUs for the log, returned once; empty: none.
  std::string take_gpu_note() { return forked() ? std::string() : work_.take_gpu_note(); }

 private:
  friend struct testing::RuntimeAccess;
  void post_checked(const std::shared_ptr<RequestState>& posted);
  void linger(const RequestState& posted);
  void end_refused(RequestState& posted, const Failure& why);
  // The other ranks' message when this rank leaves.
  std::string left_text(const std::string& reason) const;

  const uint32_t forks_ = fork_number();
  RuntimeContext context_;
  Turns turns_;
  Requests requests_;
  ThreadCommands commands_{context_.world, context_.table, context_.agreement, context_.inquiry, requests_};
  SpinPolicy spin_policy_;
  TimelineNotes notes_{context_.world, context_.table};
  SendQueue queue_;
  Parts parts_{context_, requests_, queue_, spin_policy_, notes_};
  LateRanks late_ranks_{context_.world, context_.table, requests_, turns_, commands_};
  RuntimeThread work_;
  std::mutex leave_mutex_;
  std::thread thread_;
};

// Memory in the host's segment for requests in place. It belongs to one rank and outlives single operations.

// Keeps the runtime alive, and so the segment mapped.
class Buffer {
 public:
  // Reserves addresses only; commit() adds memory.
  Buffer(std::shared_ptr<Runtime> runtime, size_t bytes);
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();

  const std::shared_ptr<Runtime>& runtime() const { return runtime_; }
  char* data() const;
  // Commits memory for the first `bytes` bytes, zeroed; throws Error when there is no memory left. Thread-safe.
  void commit(size_t bytes);
  uint64_t offset() const { return offset_; }
  size_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<Runtime> runtime_;
  uint64_t offset_;
  size_t bytes_;
  std::mutex mutex_;
  size_t committed_ = 0;
};

}  // namespace mykv
