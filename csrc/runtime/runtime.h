// Moves requests through their day: share copied into a slot, arrival in the host's table, the transport's work, result
// copied out, done. Small requests that complete a set run on the thread that posts them; everything else on the
// runtime's own thread, the only one that ever waits for other ranks.
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
#include "runtime/lookout.h"
#include "runtime/patience.h"
#include "runtime/request_state.h"
#include "runtime/send_queue.h"
#include "timeline/timeline.h"
#include "transport/gpu_roads.h"
#include "transport/mpi/compression_state.h"
#include "transport/nccl/nccl_transport.h"
#include "transport/transport.h"
#include "world/world.h"

namespace mykv {

struct RuntimeOptions {
  WorldOptions world;
  // Requests larger than this travel in parts of this size, so that copying in, reducing and copying out overlap and
  // stay in cache. The same on all ranks.
  size_t part_bytes = 512 << 10;
  // Memory for the slots of parts under way: little enough to stay in cache. It is exceeded only when nothing moves.
  size_t staging_bytes = 4 << 20;
  // Several hosts: memory for what this rank receives from the others; operations of twice as much for each slice are
  // under way. The same on all ranks.
  size_t network_bytes = 4 << 20;
  // Arrays of fewer bytes are not compressed between hosts: there is little to gain. The same on all ranks.
  size_t compress_bytes = 64 << 10;
  // The second limit of the stall watch, 0: none. Only compared here: one rank speaks for those that wait with it, so
  // it must be the same on all.
  size_t stall_abort_ms = 0;
  gpu::Settings gpu;
};

class Buffer;
class Layers;

class Runtime : public std::enable_shared_from_this<Runtime> {
 public:
  Runtime(MPI_Comm comm, const RuntimeOptions& options);
  // In a world that was made already, for which options.world does not count.
  Runtime(std::unique_ptr<World> world, const RuntimeOptions& options);
  ~Runtime();

  // Takes the next turn under `name`; call it in the order in which the operations are asked for.
  uint64_t take_turn(const std::string& name);
  // The next place in that order, for one request.
  std::shared_ptr<const Ticket> take_ticket();
  // The turn that was taken last under `name`, for what belongs to that operation under another name. With a counter of
  // its own it would fall behind on a rank that failed in between.
  uint64_t last_turn(const std::string& name);
  // Drops the turn counters of all names that begin with `prefix`, and what their compression has kept back.
  void forget(const std::string& prefix);
  // Names under which turns are counted.
  size_t counted_names();
  // Returns at once. The request's buffers must stay until done was called.
  void post(Request request);
  // Addresses in the host's segment for requests in place; Buffer::commit() puts memory behind them.
  std::shared_ptr<Buffer> reserve(size_t bytes);
  // Tells the other ranks that this one goes, ends its own pending requests with the reason, and stops the thread.
  void leave(const std::string& reason);
  // Whether leave() was called.
  bool left() const { return stopping_.load(std::memory_order_relaxed); }
  // Why this rank can do no more here although it has not left; empty: it can.
  std::string broken();
  // Runtimes that belong to this one, and end with it.
  std::vector<std::shared_ptr<Runtime>> own_runtimes() const;
  // Whether this is another process than the one that made the runtime: a fork, which has no thread and no part in it.
  bool forked() const { return getpid() != process_; }

  const World& world() const { return world_; }
  const RuntimeOptions& options() const { return options_; }
  const gpu::GpuRoads& gpus() const { return gpus_; }
  const Agreement& agreement() const { return agreement_; }

  // Who keeps this rank's operations waiting (late_ranks.cpp). Any thread.
  // How long the oldest of them has waited, in seconds; 0: there is none.
  double longest_wait();
  // Those that have waited so long, the oldest first; of `name` only, unless it is empty. On several hosts this asks
  // the others, which takes up to some seconds where one of them does not answer.
  std::vector<Waiting> waiting(double least_seconds, const std::string& name);
  // For each name the ranks that have arrived at the operation at which this rank will come next, and has not asked
  // for; with turn_of at the one that has the last turn under that name. On several hosts this asks the others, as
  // waiting() does.
  std::vector<std::vector<int>> waiting_for_this(const std::vector<std::string>& names, const std::string& turn_of);
  // Ends the operations under these names that some rank has not arrived at, with an error on all ranks, also on those
  // that come later. Without effect where all have arrived.
  void give_up(const std::unordered_map<std::string, std::string>& reasons);
  // This rank leaves, with this reason; for when a rank has arrived and does not go on.
  void break_off(const std::string& reason);
  // Gives the host's table up, which one of its ranks keeps locked: all ranks of the host end what they have under way.
  void give_up_table(const std::string& reason);
  // For tests: sends this process a signal while it keeps the host's table locked.
  void signal_under_lock(int number);
  // A process of this world has died: this rank ends all that it has under way, with this reason, and never frees what
  // belongs to all of them.
  void lose(const std::string& reason);
  // Whether somebody calls lose() soon after a process has died, so that what fails by a death can name it. Of all
  // runtimes of this process; any thread.
  static std::atomic<bool>& watched();
  // What a log should say of this rank's GPUs, once; empty: nothing.
  std::string take_gpu_note();

 private:
  friend class Buffer;
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
  void finish_part(const Part& part, const std::string& error);
  void end_part(const Part& part, const std::string& error, const PartRecord::Interval& copied_out);
  void release_slot(const Part& part);
  void account(const Part& part, const std::string& error);
  void copy_in(const Request& request, const Operation& op, const Part& part) const;
  void copy_out(const Request& request, size_t begin, size_t count, const char* slot) const;
  void end(RequestState& posted, const std::string* error);
  void end_refused(RequestState& posted, const std::string& why);
  void end_all(const std::string& reason);
  void tell_departure();
  bool take_wishes();
  std::vector<Waiting> waiting_here(double least_seconds, const std::string& name);
  std::vector<Inquiry::Answer> ask_hosts(const std::vector<Key>& keys);
  std::string cause_of(const std::string& failure);
  void break_down(const Departed& gone, const std::string& here, const std::string& there);
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
  void record_end(RequestState& posted, const std::string* error);
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
  std::unique_ptr<NcclTransport> nccl_;  // where it serves
  std::unique_ptr<Layers> layers_;       // where it serves each host
  Agreement agreement_;
  Inquiry inquiry_;
  Patience patience_;
  Lookout lookout_;

  const std::shared_ptr<Tickets> tickets_ = std::make_shared<Tickets>();
  std::mutex turns_mutex_;
  std::unordered_map<std::string, uint64_t> turns_;
  CompressionStates compressions_;

  std::mutex mutex_;                                  // guards the members of this paragraph
  std::deque<std::shared_ptr<RequestState>> posted_;  // for the thread to take over
  std::unordered_map<uint32_t, Part> parts_;          // by entry: what this rank has under way
  std::string stopped_;                               // why no request is taken any more
  std::string leave_reason_;                          // what leave() was told
  size_t staged_bytes_ = 0;
  size_t moving_parts_ = 0;  // large ones in slots, that all ranks have brought
  size_t large_parts_ = 0;
  Clock::time_point moved_;  // when a slot was last taken within the limit, or given back
  struct Question {
    std::vector<Key> keys;
    bool asked = false;
    std::vector<Inquiry::Answer> answers;
  };
  std::shared_ptr<Question> question_;  // wishes of other threads for this runtime's
  std::deque<std::pair<Key, std::string>> to_give_up_;
  std::string break_off_;
  std::condition_variable answered_;
  std::string gpu_note_;
  int64_t crowded_out_since_ = 0;  // the host's table has had no room for anything more; coarse_now_ns(), 0: it has
  std::string crowded_out_;        // the name of what comes next

  // Of the thread alone.
  SendQueue waiting_;
  bool listening_ = false;   // some of them have found no place in the host's table
  std::deque<Key> offered_;  // then: entries that others may have made for them
  struct Finished {
    Part part;
    std::string error;
    int64_t since;  // now_ns()
  };
  std::deque<Finished> finished_;
  bool departure_told_ = false;
  bool worked_ = false;      // since it last waited
  bool advanced_ = false;    // something that is under way came further
  int64_t awake_since_ = 0;  // where the timeline marks that
  int64_t flowed_ = 0;       // when it last had something to do; coarse_now_ns()
  int64_t looked_ = 0;       // when it last looked for questions of other hosts; coarse_now_ns()
  bool blocked_ = false;     // something in waiting_ could go if there were room for it
  std::unique_ptr<Staged> staged_;
  std::string retired_;    // why this rank leaves of its own accord; empty: it does not
  bool gpu_told_ = false;  // gpu_note_ was there once

  std::atomic<bool> wished_{false};  // there is one, or a message of one is still on its way
  std::mutex asking_mutex_;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> lost_{false};
  std::mutex leave_mutex_;
  std::thread thread_;
};

}  // namespace mykv
