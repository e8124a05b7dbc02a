#include "runtime/runtime.h"

#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <iterator>

#include "base/clock.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/planted_faults.h"
#include "gpu/device_memory.h"
#include "operations/overlap.h"
#include "operations/signature.h"
#include "runtime/buffer.h"
#include "runtime/standstill.h"

namespace mykv {

namespace {

constexpr int64_t kIdlePollUs = 10000;    // on several hosts with nothing under way: for news, and for MPI's queues
constexpr int64_t kDrainNs = 2000000000;  // for which MPI may keep messages queued after the last operation
constexpr int64_t kRetryUs = 1000;        // when the host's table is full, or this rank's share of memory
constexpr int64_t kGpuPollUs = 200;       // between looks at copies, and at streams that the copies wait for
constexpr int64_t kLookNs = 100000000;    // between looks for questions of other hosts, at most
constexpr int64_t kSleepUs = 1000000;     // upper bound of any sleep
constexpr int64_t kRestUs = 250000;       // sleep of an idle rank between hosts; after 500 ms it would count as stopped
constexpr int64_t kBrokenPatienceUs = 1000000;            // for the table's lock, when this rank breaks down
constexpr int64_t kSettleNs = 1000000000;                 // for chunks of failed operations that other ranks have begun
constexpr int64_t kLostSettleNs = 200000000;              // the same, if a process with such a chunk may have died
constexpr useconds_t kLateUs = 500000;                    // as a fault for tests
constexpr int64_t kFlushNs = 20000000;                    // for MPI to put the last messages on the wire
constexpr int64_t kLostPatienceNs = 2000000000;           // for the failure detector to name the process that has ended
constexpr auto kLeavePatience = std::chrono::seconds(5);  // for operations that all ranks had agreed on
constexpr auto kGonePatience = std::chrono::seconds(20);  // the same on ranks that stay; notices should end it earlier

// Process sets use the launcher of the world, and so launch in the order of the world's operations.
std::shared_ptr<Launcher> launcher_of(const World& world, HostTable& table) {
  if (world.is_part()) return Launcher::current();
  return Launcher::begin(table.launch_order(), world.hosts()[static_cast<size_t>(world.host())]);
}

gpu::GpuRoads gpus_of(const World& world, const RuntimeOptions& options, const Launcher* launcher) {
  gpu::GpuRoads gpus = gpu::find_gpu_roads(world, options.gpu);
  limit_to_ordered(&gpus, world, launcher, !world.is_part());
  return gpus;
}

}  // namespace

Runtime::Runtime(MPI_Comm comm, const RuntimeOptions& options)
    : Runtime(std::make_unique<World>(comm, options.world), options) {}

Runtime::Runtime(std::unique_ptr<World> world, const RuntimeOptions& options)
    : options_(options),
      made_(std::move(world)),
      table_(world_.segment(), world_.labels(world_.hosts()[static_cast<size_t>(world_.host())]), world_.local_rank(),
             0, world_.hosts().size() > 1),
      launcher_(launcher_of(world_, table_)),
      gpus_(gpus_of(world_, options, launcher_.get())),
      region_(world_.segment(), world_.region_begin(), world_.region_bytes()),
      transport_(choose_transport(world_, table_, options.network_bytes)),
      nccl_(gpus_.nccl ? std::make_unique<NcclTransport>(world_, table_, launcher_) : nullptr),
      agreement_(world_, table_, 2 * options.network_bytes),
      inquiry_(world_, table_),
      waits_(world_.local_size()),
      staged_(std::make_unique<Staged>(world_.segment(), region_)) {
  table_.beat();
  if (testing::checks_lock_order()) table_.lock().comes_before(mutex_);
  world_.require_same("the size of parts (MYKV_PART_BYTES)", options.part_bytes);
  world_.require_same("the memory for other hosts (MYKV_NETWORK_BYTES)", options.network_bytes);
  world_.require_same("the size from which arrays are compressed (MYKV_COMPRESS_BYTES)", options.compress_bytes);
  world_.require_same("the stall watch's second limit in milliseconds (MYKV_STALL_ABORT_S)", options.stall_abort_ms);
  thread_ = std::thread([this] { run(); });
}

Runtime::~Runtime() {
  leave("it shut down");
  if (transport_->polling() || staged_->unsafe) world_.keep_segment();
  if (forked()) {
    (void)staged_.release();  // CUDA's objects are the parent's
  } else if (!staged_->unsafe) {
    staged_->slots.unregister();
  }
  if (lost_.load()) world_.let_go();
  if (!forked() && transport_->quiet() && agreement_.quiet() && inquiry_.quiet()) world_.is_quiet();
}

std::shared_ptr<Buffer> Runtime::reserve(size_t bytes) {
  return std::make_shared<Buffer>(shared_from_this(), region_.reserve(bytes), bytes);
}

uint64_t Runtime::take_turn(const std::string& name) {
  std::lock_guard<std::mutex> lock(turns_mutex_);
  return turns_[name]++;
}

std::shared_ptr<const Ticket> Runtime::take_ticket() {
  return forked() ? nullptr : tickets_->take();  // in a fork the lock may never be free, and post() throws
}

uint64_t Runtime::last_turn(const std::string& name) {
  std::lock_guard<std::mutex> lock(turns_mutex_);
  const auto it = turns_.find(name);
  return it == turns_.end() || it->second == 0 ? 0 : it->second - 1;
}

void Runtime::forget(const std::string& prefix) {
  compressions_.forget(prefix);
  std::lock_guard<std::mutex> lock(turns_mutex_);
  for (auto it = turns_.begin(); it != turns_.end();) {
    it = it->first.compare(0, prefix.size(), prefix) == 0 ? turns_.erase(it) : std::next(it);
  }
}

size_t Runtime::counted_names() {
  std::lock_guard<std::mutex> lock(turns_mutex_);
  return turns_.size();
}

void Runtime::post(Request request) {
  auto posted = std::make_shared<RequestState>();
  posted->request = std::move(request);
  try {
    post_checked(posted);
  } catch (const TableGivenUp&) {
    Cause why;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (posted->ended) return;
      if (stopped_.empty()) {
        // The thread is about to break down, and ends this request with all others, with the cause.
        posted->next = 0;
        posted_.push_back(posted);
        table_.bell(world_.local_rank()).ring();
        return;
      }
      why = stopped_;
    }
    end_refused(*posted, why);
  } catch (const std::exception& error) {
    end_refused(*posted, as_cause(error));
  }
}

void Runtime::end_refused(RequestState& posted, const Cause& why) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (std::exchange(posted.ended, true)) return;
  }
  const Cause error = shown_name(posted.request.name) + ": " + why;
  end(posted, &error);
}

void Runtime::post_checked(const std::shared_ptr<RequestState>& posted) {
  if (forked()) throw Error("mykv works only in the process that initialized it, not in a fork of it");
  Request& request = posted->request;
  const Operation& op = request.operation;
  if (Timeline::on()) posted->record = Timeline::instance().record();
  posted->recorded = posted->record != nullptr;
  if (posted->recorded) posted->begun = posted->record->begin;
  posted->number = hash_bytes(request.name.data(), request.name.size(), 0) + request.turn;
  posted->age = request.ticket ? request.ticket->number() : 0;
  posted->cut(options_.part_bytes);
  // Parts end in any order, and the owner of a part reads and writes the arrays in place.
  const bool may_be_owned = (request.scattered || request.inputs.size() == 1) && op.bytes() > kPostInlineBytes;
  if (request.refusal.empty() && (posted->parts > 1 || may_be_owned)) request.refusal = overlap_in_part(request);
  // A request that needs little or no copying is sent by the thread that posts it, which saves a wake-up.
  const bool ready = request.devices == nullptr && (request.in_place || op.bytes() <= kPostInlineBytes);
  bool direct = op.road != Road::nccl && posted->parts == 1 && (!request.refusal.empty() || ready);
  for (;;) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!stopped_.empty()) throw Error(stopped_);
      if (!direct) {
        posted_.push_back(posted);
        break;
      }
      posted->next = 1;
    }
    if (testing::is_planted(testing::Fault::late)) usleep(kLateUs);
    if (send_part(posted, 0, true)) return;
    posted->next = 0;
    direct = false;
  }
  table_.bell(world_.local_rank()).ring();
}

void Runtime::run() {
  prctl(PR_SET_NAME, "mykv");
  gpu::Memory::free_elsewhere();
  prctl(PR_SET_TIMERSLACK, 1000UL);  // 1 us instead of 50: short sleeps between looks at the network
  try {
    work_until_leaving();
    const Cause here = retired_.empty() ? Cause("this rank has shut mykv down", ErrorCode::left) : Cause(retired_);
    const Departed gone(world_.label(world_.rank()), retired_.empty() ? leave_reason() : retired_);
    // A world of one rank departs only here, since all its operations could end. A thread may be about to post.
    if (world_.size() == 1) table_.depart(gone.rank, gone.reason);
    if (entries().empty()) {
      settle({});
      if (nccl_) nccl_->leave({});
      end_all(here);
    } else {
      break_down(gone, here, gone.cause());
    }
  } catch (const std::exception& error) {
    const Cause seen = as_cause(error);
    const Cause failure = cause_of(seen);
    const auto* const other = dynamic_cast<const Departed*>(&error);
    if (other != nullptr && failure == seen) {
      break_down(*other, failure, failure);
    } else {
      const Departed gone(world_.label(world_.rank()), failure);
      break_down(gone, failure, failure == seen ? gone.cause() : Cause());
    }
  }
  launcher_.reset();
}

// Returns when this rank leaves and has nothing more to do for other ranks, or has waited for them in vain.
void Runtime::work_until_leaving() {
  Bell& bell = table_.bell(world_.local_rank());
  Standstill standstill;
  for (;;) {
    const uint32_t seen = bell.count();
    // Read before work(), so that the last round still tells the other hosts that this rank leaves.
    const bool leaving = stopping_.load() || !retired_.empty();
    table_.beat();
    table_.look_after_lock();
    const bool worked = work();
    if (std::exchange(advanced_, false) || (!leaving && table_.departed_rank() < 0)) {
      standstill.end();
    } else if (leaving) {
      if (standstill.look() > kLeavePatience) return;
    } else if (standstill.look() > kGonePatience && world_.hosts().size() > 1 && !entries().empty()) {
      throw table_.departed();  // no notice of the rank that gave up has come
    }
    if (worked) {
      worked_ = true;
      continue;
    }
    if (leaving && nothing_left()) return;
    if (Timeline::marks_cycles()) record_awake();
    sleep(seen);
    awake_since_ = Timeline::marks_cycles() ? now_ns() : 0;
  }
}

bool Runtime::nothing_left() {
  if (agreement_.speaks() && !agreement_.closed()) return false;  // rank 0 may not know that this rank leaves
  std::lock_guard<std::mutex> lock(mutex_);
  return parts_.empty() && finished_.empty() && !staged_->copying() && !staged_->gated && !transport_->polling() &&
         !gpus_polling() && !agreement_.sending();
}

std::string Runtime::leave_reason() {
  std::lock_guard<std::mutex> lock(mutex_);
  return leave_reason_;
}

std::atomic<bool>& Runtime::watched() {
  static std::atomic<bool> one{false};
  return one;
}

// The reason given to lose(), if lose() is called soon; otherwise this failure. When a process dies, MPI may fail or
// the table be given up before it is known which process has died.
Cause Runtime::cause_of(const Cause& failure) {
  const int64_t begun = now_ns();
  for (;;) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!break_off_.empty()) return break_off_;
    }
    if (!watched().load() || stopping_.load() || now_ns() - begun > kLostPatienceNs) return failure;
    table_.beat();
    usleep(kRetryUs);
  }
}

// The thread cannot go on, so no rank may wait for this rank any more. `gone`: the rank that is the cause. `here`: the
// error of this rank's operations; `there`: the error on the other ranks of this host, empty: the same.
void Runtime::break_down(const Departed& gone, const Cause& here, const Cause& there) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopped_.empty()) stopped_ = here;
  }
  std::vector<uint32_t> mine = entries();
  table_.lock().lose_patience(kBrokenPatienceUs, gone.what());
  try {
    table_.depart(gone.rank, gone.reason, true);
    mine = entries();  // a thread that posted meanwhile may have added an entry; after depart() no thread can
    for (uint32_t entry : mine) {
      const std::string name = shown_name(table_.entry(entry).name);
      table_.fail(entry, there.empty() ? here : name + ": " + there);
    }
    find_finished(mine);
    mine = entries();
  } catch (const std::exception&) {
    // The shared table is unusable, which the other ranks of this host notice themselves.
    mine = entries();
    for (uint32_t entry : mine) table_.stop_chunks(entry);
  }
  transport_->give_up(gone);
  tell_rank_0(gone);
  take_results();
  settle(mine);
  settle_copies();
  if (nccl_) nccl_->abort(mine);
  end_all(here);
}

// Finds entries that ended with a result before this rank noticed: other ranks may have taken the result.
void Runtime::find_finished(const std::vector<uint32_t>& entries) {
  for (uint32_t entry : entries) {
    if (table_.state(entry) != State::done || !table_.entry(entry).error.empty()) continue;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto it = parts_.find(entry);
      if (it == parts_.end()) continue;  // the thread that posted the part finishes it
      finished_.push_back({it->second, {}, now_ns()});
      parts_.erase(it);
    }
    transport_of(table_.entry(entry).operation).stop(entry);
  }
}

void Runtime::take_results() {
  const auto failed =
      std::stable_partition(finished_.begin(), finished_.end(), [](const Finished& one) { return one.error.empty(); });
  const std::vector<Finished> results(std::make_move_iterator(finished_.begin()), std::make_move_iterator(failed));
  finished_.erase(finished_.begin(), failed);
  for (const Finished& one : results) {
    try {
      finish_part(one.part, {});
    } catch (const Error&) {
      // The table was given up later; the result is still valid.
    }
  }
}

// Directly, not through the first rank of this host, which may be the rank that is gone.
void Runtime::tell_rank_0(const Departed& gone) {
  // Rank 0 may have failed while it gave verdicts, before it told the other hosts. Telling them is idempotent.
  const bool told = std::exchange(departure_told_, true) && (world_.rank() != 0 || agreement_.closed());
  if (world_.hosts().size() == 1 || told) return;
  try {
    agreement_.depart_alone(gone.rank, gone.reason);
  } catch (const std::exception&) {
    // MPI is unusable.
  }
}

// No rank may touch the memory of an operation any more when its caller gets the error. Some MPIs report a message as
// sent while it waits in a queue of their own, which they empty only when they are called.
void Runtime::settle(const std::vector<uint32_t>& mine) {
  const int64_t patience = lost_.load() ? kLostSettleNs : kSettleNs;
  const int64_t least = world_.hosts().size() > 1 ? kFlushNs : 0;
  const auto unsettled = [&](uint32_t entry) { return !table_.settled(entry); };
  for (const int64_t begun = now_ns(); now_ns() - begun < patience; usleep(kRetryUs)) {
    table_.beat();
    bool over = transport_->settled() && now_ns() - begun >= least;
    try {
      agreement_.progress_sending();
      over = over && !agreement_.sending();
    } catch (const std::exception&) {
      // MPI is unusable.
    }
    if (over && std::none_of(mine.begin(), mine.end(), unsettled)) return;
  }
}

Transport& Runtime::transport_of(const Operation& operation) const {
  return operation.road == Road::nccl ? *nccl_ : *transport_;
}

// The entries at which this rank has arrived and that it has not left.
std::vector<uint32_t> Runtime::entries() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<uint32_t> entries;
  for (const auto& [entry, part] : parts_) entries.push_back(entry);
  return entries;
}

void Runtime::tell_departure() {
  if (!agreement_.speaks() || departure_told_ || table_.departed_rank() < 0) return;
  departure_told_ = true;
  if (agreement_.closed()) return;  // rank 0 has told this host
  const Departed gone = table_.departed();
  agreement_.depart(gone.rank, gone.reason);
}

bool Runtime::work() {
  bool worked = take_posted();
  bool advanced = take_events();
  advanced |= take_finished();
  if (staged_->copying()) {
    advanced |= take_copied_in();
    advanced |= take_copied_out();
  }
  worked |= start_parts();
  advanced |= transport_->progress();
  if (nccl_) advanced |= nccl_->progress();
  if (agreement_.speaks()) {
    worked |= agreement_.progress();
    // A host that asks waits only a few seconds, so a busy rank looks too.
    const int64_t now = coarse_now_ns();
    if (!worked || now - looked_ > kLookNs) {
      looked_ = now;
      worked |= inquiry_.answer_one();
    }
    tell_departure();
  }
  if (wished_.load(std::memory_order_acquire)) worked |= take_wishes();
  advanced_ |= advanced;
  return worked || advanced;
}

void Runtime::sleep(uint32_t seen) {
  bool expecting, soon;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    expecting = !parts_.empty();
    soon = large_parts_ == 0;
  }
  const bool copying = staged_->copying();
  const bool flowing = transport_->polling() || gpus_polling() || copying;
  const bool polling = flowing || agreement_.polling() || staged_->gated;
  const bool worked = std::exchange(worked_, false);
  if (worked || flowing) flowed_ = coarse_now_ns();
  if (polling) {
    if (worked) waits_.moved();
    int64_t pause = waits_.pause(flowing, soon);
    if (copying || staged_->gated || gpus_polling()) pause = std::min(pause, kGpuPollUs);
    if (pause == 0) {
      sched_yield();
    } else {
      table_.bell(world_.local_rank()).wait(seen, blocked_ || !finished_.empty() ? std::min(pause, kRetryUs) : pause);
    }
    return;
  }
  if (worked && expecting) waits_.expect_bell();
  if (expecting && waits_.spin(table_.bell(world_.local_rank()), seen)) return;
  int64_t limit = kSleepUs;
  if (world_.hosts().size() > 1) {
    const bool polls = agreement_.speaks() || coarse_now_ns() - flowed_ < kDrainNs;
    limit = polls ? kIdlePollUs : kRestUs;
  }
  if (blocked_ || !finished_.empty() || wished_.load(std::memory_order_relaxed)) limit = kRetryUs;
  if (stopping_.load() || !retired_.empty()) limit = std::min(limit, kRetryUs);
  table_.bell(world_.local_rank()).wait(seen, limit);
}

bool Runtime::take_posted() {
  std::deque<std::shared_ptr<RequestState>> taken;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    taken.swap(posted_);
  }
  for (auto& posted : taken) {
    waiting_.add(posted);
    if (listening_) offered_.push_back(SendQueue::key_of(*posted));
  }
  return !taken.empty();
}

bool Runtime::take_events() {
  TableEvent event;
  bool overrun = false;
  bool any = false;
  while (table_.next_event(&event, &overrun)) {
    any = true;
    if (overrun) {
      rescan();
    } else {
      handle_event(event);
    }
  }
  return any;
}

void Runtime::handle_event(const TableEvent& event) {
  if (event.type == TableEvent::Type::made) {
    if (!listening_) return;
    if (const auto key = table_.made(event)) offered_.push_back(*key);
    return;
  }
  std::unique_lock<std::mutex> lock(mutex_);
  const auto it = parts_.find(event.entry);
  if (it == parts_.end() || it->second.generation != event.generation) return;
  Part& part = it->second;
  switch (event.type) {
    case TableEvent::Type::made:
      return;
    case TableEvent::Type::announced:
      if (!agreement_.speaks() || std::exchange(part.announced, true)) return;
      lock.unlock();
      if (table_.state(event.entry) == State::announced) {
        const Operation& operation = table_.entry(event.entry).operation;
        agreement_.announce(event.entry, transport_of(operation).places(operation));
      }
      return;
    case TableEvent::Type::ready:
      part.posted->agreed = true;
      if (listening_) offered_.push_back(SendQueue::key_of(*part.posted));  // others may have brought its next parts
      if (std::exchange(part.started, true)) return;
      note_agreed(part);
      moving_parts_ += part.slot_bytes > kPostInlineBytes;
      if (part.posted->recorded && world_.hosts().size() > 1) {
        part.agreed = now_ns();
        part.hosts = agreement_.take_arrivals(table_.entry(event.entry).key);
      }
      {
        const LocalShare share = part.share;
        lock.unlock();
        transport_of(table_.entry(event.entry).operation).start(event.entry, share);
      }
      return;
    case TableEvent::Type::done:
      if (is_owed(part)) {
        lock.unlock();
        give_up_owed(event.entry);
      }
      finished_.push_back({part, table_.entry(event.entry).error.get(), now_ns()});
      if (finished_.back().error.empty() && !part.started) note_agreed(part);
      parts_.erase(it);
      lock.unlock();
      agreement_.done(table_.entry(event.entry).sequence);
      transport_of(table_.entry(event.entry).operation).stop(event.entry);
      return;
  }
}

// Whether other ranks still need this rank for a part that is done: another rank has given it up while it is under way
// here, on GPUs or between hosts, and its memory may still be written to; or the other hosts have begun it, or will,
// and wait for this rank's share.
bool Runtime::is_owed(const Part& part) {
  Entry& entry = table_.entry(part.entry);
  if (transport_of(entry.operation).holds(part.entry)) return true;
  const bool is_agreed = entry.sequence != 0 && world_.hosts().size() > 1 && entry.operation.road != Road::nccl;
  return is_agreed && !entry.error.empty() && !part.started;
}

void Runtime::give_up_owed(uint32_t entry) {
  if (table_.departed_rank() >= 0) throw table_.departed();
  throw Error(table_.entry(entry).error.get());
}

// All hosts have agreed on a part.
void Runtime::note_agreed(const Part& part) {
  if (world_.hosts().size() == 1 || part.number > 0) return;
  waiting_.agree(*part.posted, table_.entry(part.entry).sequence);
}

// The log was overwritten before this rank read it: reads the state of each entry instead.
void Runtime::rescan() {
  if (listening_) offer_all();
  std::vector<TableEvent> events;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [entry, part] : parts_) events.push_back({TableEvent::Type::done, entry, part.generation});
  }
  for (TableEvent& event : events) {
    const State state = table_.state(event.entry);
    if (state == State::gathering || state == State::taken) continue;
    if (state == State::announced) event.type = TableEvent::Type::announced;
    if (state == State::ready) event.type = TableEvent::Type::ready;
    handle_event(event);
  }
}

// A failed part waits until no rank writes into its arrays any more, but at most kSettleNs: a rank may have been
// stopped while it was writing.
bool Runtime::take_finished() {
  for (auto it = finished_.begin(); it != finished_.end(); ++it) {
    if (!it->error.empty() && !table_.settled(it->part.entry) && now_ns() - it->since < kSettleNs) continue;
    const Finished finished = std::move(*it);
    finished_.erase(it);
    finish_part(finished.part, finished.error);
    return true;
  }
  return false;
}

void Runtime::leave(const std::string& reason) {
  if (forked()) {
    // The thread belongs to the parent process: there is nothing to stop.
    if (thread_.joinable()) thread_.detach();
    return;
  }
  std::lock_guard<std::mutex> leaving(leave_mutex_);
  if (!thread_.joinable()) return;
  bool broken;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    broken = !stopped_.empty();
    if (!broken) stopped_ = {"this rank has left: " + reason, ErrorCode::left};
    leave_reason_ = reason;
  }
  table_.lock().lose_patience(std::chrono::microseconds(kLeavePatience).count(),
                              "rank " + std::to_string(world_.label(world_.rank())) + " has left: " + reason);
  try {
    if (world_.size() > 1 && !broken) table_.depart(world_.label(world_.rank()), reason);
  } catch (const Error&) {
    // The table was given up, and the other ranks get that error themselves.
  }
  stopping_.store(true);
  table_.bell(world_.local_rank()).ring();
  thread_.join();
}

// The last step of a request.
void Runtime::end(RequestState& posted, const Cause* error) {
  if (posted.recorded) record_end(posted, error);
  posted.request.ticket.reset();
  posted.request.done(error);
}

// Ends all requests that this rank still has, without other ranks.
void Runtime::end_all(const Cause& reason) {
  std::vector<std::shared_ptr<RequestState>> requests;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopped_.empty()) stopped_ = reason;
    for (auto& [entry, part] : parts_) requests.push_back(part.posted);
    for (const Copying& copying : staged_->in) requests.push_back(copying.part.posted);
    for (const Copying& copying : staged_->out) requests.push_back(copying.part.posted);
    for (auto& finished : finished_) requests.push_back(finished.part.posted);
    for (auto& posted : posted_) requests.push_back(posted);
    for (auto& [priority, posted] : waiting_) requests.push_back(posted);
    requests.erase(
        std::remove_if(requests.begin(), requests.end(), [](auto& f) { return std::exchange(f->ended, true); }),
        requests.end());
    parts_.clear();
    posted_.clear();
    crowded_out_since_ = 0;
  }
  finished_.clear();
  waiting_.clear();
  offered_.clear();
  drop_copies();
  for (auto& posted : requests) {
    const Cause error = shown_name(posted->request.name) + ": " + reason;
    end(*posted, &error);
  }
}

}  // namespace mykv
