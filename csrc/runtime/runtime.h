// Runs requests from post() to done: the share is copied into a slot, the part arrives in the host's table, the
// transport works, the result is copied out. A small request of the rank that arrives last runs on the thread that
// posts it. Everything else runs on the runtime's own thread, the only thread that waits for other ranks.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "agreement/agreement.h"
#include "agreement/inquiry.h"
#include "runtime/device_parts.h"
#include "runtime/late_ranks.h"
#include "runtime/request_state.h"
#include "runtime/send_queue.h"
#include "runtime/waits.h"
#include "timeline/timeline.h"
#include "transport/gpu_roads.h"
#include "transport/mpi/compression_state.h"
#include "transport/nccl/nccl_transport.h"
#include "transport/transport.h"
#include "world/world.h"

namespace mykv {

namespace testing {
struct RuntimeAccess;  // csrc/testing/live.cpp
}

struct RuntimeOptions {
  WorldOptions world;
  // Larger requests are cut into parts of this size, so that copying in, reducing and copying out overlap and stay in
  // cache. The same on all ranks.
  size_t part_bytes = 512 << 10;
  // Memory for the slots of parts under way: small enough to stay in cache. It is exceeded only when nothing moves.
  size_t staging_bytes = 4 << 20;
  // Several hosts: memory for what this rank receives from other hosts. Operations of at most twice as many bytes, or
  // two operations, are under way. The same on all ranks.
  size_t network_bytes = 4 << 20;
  // Arrays of fewer bytes are not compressed between hosts: there is little to gain. The same on all ranks.
  size_t compress_bytes = 64 << 10;
  // The second limit of the stall watch, 0: none. Only compared here: one rank reports for all ranks that wait, so the
  // limit must be the same on all ranks.
  size_t stall_abort_ms = 0;
  gpu::Settings gpu;
};

class Buffer;

class Runtime : public std::enable_shared_from_this<Runtime> {
 public:
  Runtime(MPI_Comm comm, const RuntimeOptions& options);
  // In an existing world; options.world is ignored.
  Runtime(std::unique_ptr<World> world, const RuntimeOptions& options);
  ~Runtime();

  // Takes the next turn under `name`. Call it in the order in which the operations are asked for.
  uint64_t take_turn(const std::string& name);
  // The next place in that order, for one request.
  std::shared_ptr<const Ticket> take_ticket();
  // The turn that was taken last under `name`, for another operation that goes with it under a second name. A counter
  // for the second name would fall behind on a rank that failed between the two.
  uint64_t last_turn(const std::string& name);
  // Drops the turn counters of all names that begin with `prefix`, and the residuals of their compression.
  void forget(const std::string& prefix);
  // The number of names that have turn counters.
  size_t counted_names();
  // Returns at once. The request's buffers must stay until done was called.
  void post(Request request);
  // Addresses in the host's segment for requests in place; Buffer::commit() puts memory behind them.
  std::shared_ptr<Buffer> reserve(size_t bytes);
  // Tells the other ranks that this rank leaves, ends its own pending requests with the reason, and stops the thread.
  void leave(const std::string& reason);
  // Whether leave() was called.
  bool left() const { return stopping_.load(std::memory_order_relaxed); }
  // Whether this process is a fork of the process that made the runtime. A fork has no thread and takes no part.
  bool forked() const { return getpid() != process_; }

  const World& world() const { return world_; }
  const RuntimeOptions& options() const { return options_; }
  const gpu::GpuRoads& gpus() const { return gpus_; }
  const Agreement& agreement() const { return agreement_; }

  // Which ranks this rank's operations wait for (late_ranks.cpp). Thread-safe.
  // How long the oldest operation has waited, in seconds; 0: no operation waits.
  double longest_wait();
  // Operations that have waited for `least_seconds`, the oldest first; only those under `name`, unless it is empty. On
  // several hosts this asks the other hosts, which takes up to some seconds if a host does not answer.
  std::vector<Waiting> waiting(double least_seconds, const std::string& name);
  // For each name, the ranks that have arrived at this rank's next operation under that name, which this rank has not
  // asked for yet. With `turn_of`: at the operation with the last turn under `turn_of`. Asks other hosts as waiting().
  std::vector<std::vector<int>> waiting_for_this(const std::vector<std::string>& names, const std::string& turn_of);
  // Ends the operations under these names that some rank has not arrived at, with an error on all ranks, also on ranks
  // that arrive later. No-op for operations that all ranks have arrived at.
  void give_up(const std::unordered_map<std::string, Cause>& reasons);
  // This rank leaves, with this reason; used when a rank has arrived and does not go on.
  void break_off(const Cause& reason);
  // Gives up the host's table when one of its ranks keeps it locked: all ranks of the host end their operations.
  void give_up_table(const std::string& reason);
  // A process of this world has died: this rank ends all its operations with this reason, and never frees what all
  // ranks own together (communicators).
  void lose(const Cause& reason);
  // Whether a failure detector calls lose() soon after a process has died. Then a failure that a death causes waits for
  // the call and can name the process. One flag for all runtimes of this process; thread-safe.
  static std::atomic<bool>& watched();
  // A message about this rank's GPUs for the log, given once; empty: none.
  std::string take_gpu_note();

 private:
  friend class Buffer;
  friend struct testing::RuntimeAccess;
  using Clock = std::chrono::steady_clock;

  void run();
  void work_until_leaving();
  bool work();
  bool nothing_left();
  std::string leave_reason();
  void sleep(uint32_t seen);
  bool take_posted();
  bool take_events();
  bool take_finished();
  bool has_room();
  bool start_parts();
  enum class Start { sent, not_yet, no_room, no_place };
  Start start_next(SendQueue::Place place, bool room);
  bool start_offered(bool room);
  bool start_oldest(bool room);
  void listen();
  void offer_all();
  Due due(const RequestState& posted, size_t number) const;
  void set_crowded_out(const RequestState* posted);
  bool send_part(const std::shared_ptr<RequestState>& posted, size_t number, bool may_run_inline);
  void post_checked(const std::shared_ptr<RequestState>& posted);
  void handle_event(const TableEvent& event);
  bool is_owed(const Part& part);
  [[noreturn]] void give_up_owed(uint32_t entry);
  void note_agreed(const Part& part);
  void rescan();
  bool meet(Part& part, const Operation& operation, const std::string& refusal, bool may_run_inline);
  void finish_part(const Part& part, const Cause& error);
  void end_part(const Part& part, const Cause& error, const PartRecord::Interval& copied_out);
  void release_slot(const Part& part);
  void account(const Part& part, const Cause& error);
  void copy_in(const Request& request, const Operation& op, const Part& part) const;
  void copy_out(const Request& request, size_t begin, size_t count, const char* slot) const;
  void end(RequestState& posted, const Cause* error);
  void end_refused(RequestState& posted, const Cause& why);
  void end_all(const Cause& reason);
  void tell_departure();
  bool take_wishes();
  std::vector<Waiting> waiting_here(double least_seconds, const std::string& name);
  std::vector<Inquiry::Answer> ask_hosts(const std::vector<Key>& keys);
  Cause cause_of(const Cause& failure);
  void break_down(const Departed& gone, const Cause& here, const Cause& there);
  void find_finished(const std::vector<uint32_t>& entries);
  void take_results();
  void tell_rank_0(const Departed& gone);
  void settle(const std::vector<uint32_t>& mine);
  bool withdraw(const Part& part);
  // Arrays on GPUs that go through slots (device_parts.cpp).
  bool awaits_device(RequestState& posted);
  void begin_copy_in(Part part, const Operation& operation);
  void copy_from_devices(Copying& copying);
  bool take_copied_in();
  void join_inputs(Copying& copying);
  void begin_copy_out(const Part& part);
  void copy_to_devices(const Part& part);
  bool take_copied_out();
  void retire(const std::string& failure);
  std::string retired_text(const Part& part) const;
  void abandon(Copying& copying);
  void settle_copies();
  void drop_copies();
  Transport& transport_of(const Operation& operation) const;
  bool gpus_polling() const { return nccl_ && nccl_->polling(); }
  std::vector<uint32_t> entries();
  // For the timeline (timeline_notes.cpp).
  void record(const Part& part, const PartRecord::Interval& copied_out);
  void record_end(RequestState& posted, const Cause* error);
  void record_awake();

  const pid_t process_ = getpid();
  RuntimeOptions options_;
  const std::unique_ptr<World> made_;
  World& world_{*made_};
  HostTable table_;
  std::shared_ptr<Launcher> launcher_;
  const gpu::GpuRoads gpus_;
  Timeline::Interest interest_{table_.stamp_flag()};
  Region region_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<NcclTransport> nccl_;  // null: NCCL does not serve all ranks
  Agreement agreement_;
  Inquiry inquiry_;
  Waits waits_;

  const std::shared_ptr<Tickets> tickets_ = std::make_shared<Tickets>();
  std::mutex turns_mutex_;
  std::unordered_map<std::string, uint64_t> turns_;
  CompressionStates compressions_;

  std::mutex mutex_;                                  // guards the members of this paragraph
  std::deque<std::shared_ptr<RequestState>> posted_;  // for the thread to take over
  std::unordered_map<uint32_t, Part> parts_;          // by entry: parts of this rank in the host's table
  Cause stopped_;                                     // why no request is taken any more
  std::string leave_reason_;                          // what leave() was told
  size_t staged_bytes_ = 0;
  size_t moving_parts_ = 0;  // large parts in slots, at which all ranks have arrived
  size_t large_parts_ = 0;
  Clock::time_point moved_;  // when a slot was last taken within the limit, or released
  struct Question {
    std::vector<Key> keys;
    bool asked = false;
    std::vector<Inquiry::Answer> answers;
  };
  std::shared_ptr<Question> question_;  // from here on: what other threads ask of the runtime's thread
  std::deque<std::pair<Key, Cause>> to_give_up_;
  Cause break_off_;
  std::condition_variable answered_;
  std::string gpu_note_;
  int64_t crowded_out_since_ = 0;  // since when the host's table has had no room; coarse_now_ns(), 0: it has room
  std::string crowded_out_;        // the name of the request that found no room

  // Used by the thread only.
  SendQueue waiting_;
  bool listening_ = false;   // some waiting request has found no room in the host's table
  std::deque<Key> offered_;  // while listening_: keys of waiting requests for which other ranks may have made entries
  struct Finished {
    Part part;
    Cause error;
    int64_t since;  // now_ns()
  };
  std::deque<Finished> finished_;
  bool departure_told_ = false;
  bool worked_ = false;      // the thread has worked since it last waited
  bool advanced_ = false;    // some operation under way has advanced
  int64_t awake_since_ = 0;  // set only if the timeline marks cycles
  int64_t flowed_ = 0;       // when the thread last had work; coarse_now_ns()
  int64_t looked_ = 0;       // when the thread last looked for questions of other hosts; coarse_now_ns()
  bool blocked_ = false;     // a request in waiting_ lacks only room
  std::unique_ptr<Staged> staged_;
  std::string retired_;    // why this rank leaves of its own accord; empty: it does not
  bool gpu_told_ = false;  // gpu_note_ was set once

  std::atomic<bool> wished_{false};  // another thread asks for something, or a message about it is still on its way
  std::mutex asking_mutex_;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> lost_{false};
  std::mutex leave_mutex_;
  std::thread thread_;
};

}  // namespace mykv
