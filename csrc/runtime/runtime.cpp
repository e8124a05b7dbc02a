#include "runtime/runtime.h"

#include <sys/prctl.h>

#include <algorithm>
#include <chrono>

#include "kernels/kernels.h"
#include "runtime/error.h"

namespace mykv {

namespace {

constexpr size_t kPostInlineBytes = 32 << 10;  // shares up to this size are copied in by the thread that posts them
constexpr int64_t kPollUs = 50;                // between two looks at a network on which something is under way
constexpr int64_t kIdlePollUs = 10000;         // on several hosts with nothing under way: news of ranks that left
constexpr int64_t kRetryUs = 1000;             // when the host's table is full
constexpr int64_t kSleepUs = 1000000;          // upper bound of any sleep
constexpr auto kLeavePatience = std::chrono::seconds(5);  // for operations that all ranks had agreed on

using Clock = std::chrono::steady_clock;

// An output that begins inside an input: a later part would read what an earlier one wrote.
bool overlap_partly(const Request& request) {
  const size_t bytes = request.operation.bytes();
  for (const void* input : request.inputs) {
    for (const void* output : request.outputs) {
      const auto a = reinterpret_cast<uintptr_t>(input);
      const auto b = reinterpret_cast<uintptr_t>(output);
      if (a != b && a < b + bytes && b < a + bytes) return true;
    }
  }
  return false;
}

}  // namespace

// A request under way. Its counters are guarded by Runtime::mutex_.
struct Runtime::Flight {
  Request request;
  size_t part_elements = 0;
  size_t parts = 1;
  size_t next = 0;       // the next part to send
  size_t under_way = 0;  // parts sent and not finished
  size_t finished = 0;
  bool agreed = false;  // all ranks brought the same operation, and so send all of its parts
  bool ended = false;   // done was called
  std::string error;
};

// One part of a flight, at the rendezvous under one entry.
struct Runtime::Part {
  std::shared_ptr<Flight> flight;
  size_t begin = 0;  // elements
  size_t count = 0;
  uint64_t slot = 0;
  size_t slot_bytes = 0;
  Share share;  // instead of a slot
  uint32_t entry = 0;
  uint32_t generation = 0;
  bool started = false;
  bool announced = false;
};

Runtime::Runtime(MPI_Comm comm, const RuntimeOptions& options)
    : options_(options),
      world_(comm, options.world),
      rendezvous_(world_.segment().base(), world_.hosts()[static_cast<size_t>(world_.host())], world_.local_rank(),
                  false, world_.hosts().size() > 1),
      region_(world_.segment(), world_.region_begin(), world_.region_bytes()),
      transport_(choose_transport(world_, rendezvous_)),
      agreement_(world_, rendezvous_) {
  world_.require_same("the size of parts (MYKV_PART_BYTES)", options.part_bytes);
  thread_ = std::thread([this] { run(); });
}

Runtime::~Runtime() {
  leave("it shut down");
  if (transport_->polling()) world_.keep_segment();
}

Buffer::~Buffer() {
  // A forked child has the same segment: giving memory back would take it from its parent.
  if (!runtime_->forked()) runtime_->region_.release_reserved(offset_, bytes_);
}

char* Buffer::data() const { return runtime_->world_.segment().base() + offset_; }

void Buffer::commit(size_t bytes) {
  constexpr size_t kStep = size_t{64} << 10;  // fewer calls when a bucket fills up one small array at a time
  if (bytes <= committed_) return;
  const size_t to = std::max(bytes, std::min(bytes_, (bytes + kStep - 1) / kStep * kStep));
  runtime_->world_.segment().commit(offset_ + committed_, to - committed_);
  committed_ = to;
}

std::shared_ptr<Buffer> Runtime::reserve(size_t bytes) {
  return std::make_shared<Buffer>(shared_from_this(), region_.reserve(bytes), bytes);
}

uint64_t Runtime::take_turn(const std::string& name) {
  std::lock_guard<std::mutex> lock(turns_mutex_);
  return turns_[name]++;
}

void Runtime::forget(const std::string& prefix) {
  std::lock_guard<std::mutex> lock(turns_mutex_);
  for (auto it = turns_.begin(); it != turns_.end();) {
    it = it->first.compare(0, prefix.size(), prefix) == 0 ? turns_.erase(it) : std::next(it);
  }
}

void Runtime::post(Request request) {
  auto flight = std::make_shared<Flight>();
  flight->request = std::move(request);
  try {
    post_checked(flight);
  } catch (const std::exception& error) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (std::exchange(flight->ended, true)) return;
    }
    const std::string text = "'" + flight->request.name + "': " + error.what();
    flight->request.done(&text);
  }
}

void Runtime::post_checked(const std::shared_ptr<Flight>& flight) {
  if (forked()) throw Error("mykv works only in the process that initialized it, not in a fork of it");
  Request& request = flight->request;
  const Operation& op = request.operation;
  flight->part_elements = std::max<size_t>(1, options_.part_bytes / item_size(op.dtype));
  if (request.in_place) {
    flight->part_elements = std::max<size_t>(1, op.count);
  } else if (request.refusal.empty()) {
    flight->parts = std::max<size_t>(1, (op.count + flight->part_elements - 1) / flight->part_elements);
  }
  if (flight->parts > 1 && overlap_partly(request)) request.refusal = "its input and its output overlap in part";
  // What needs no copying, or little, goes from the thread that posts it: no wake-up lies in between.
  bool direct = !request.refusal.empty() || request.in_place || op.bytes() <= kPostInlineBytes;
  for (;;) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!stopped_.empty()) throw Error(stopped_);
      if (!direct) {
        posted_.push_back(flight);
        break;
      }
      flight->next = 1;
    }
    if (send_part(flight, 0, true)) return;
    flight->next = 0;
    direct = false;
  }
  rendezvous_.bell(world_.local_rank()).ring();
}

// Brings one part to the rendezvous; false when the table is full.
bool Runtime::send_part(const std::shared_ptr<Flight>& flight, size_t number, bool may_run_inline) {
  const Request& request = flight->request;
  Part part;
  part.flight = flight;
  part.begin = number * flight->part_elements;
  part.count = std::min(flight->part_elements, request.operation.count - part.begin);
  std::string refusal = request.refusal;
  {
    // The other ranks may have sent parts after one that failed here, and wait for all of them.
    std::lock_guard<std::mutex> lock(mutex_);
    if (refusal.empty()) refusal = flight->error;
  }
  Operation operation = request.operation;
  operation.count = part.count;
  Rendezvous::Offer offer;
  offer.key = make_key(request.name, request.turn, number);
  offer.owner = transport_->owner(operation, offer.key);
  const bool alone = request.inputs.size() == 1 && request.outputs.size() == 1;
  const size_t offset = part.begin * item_size(operation.dtype);
  if (!refusal.empty()) {
    // Nothing to bring.
  } else if (offer.owner == world_.local_rank() && alone) {
    part.share = {static_cast<const char*>(request.inputs[0]) + offset,
                  static_cast<char*>(request.outputs[0]) + offset};
  } else if (request.in_place) {
    part.slot = *request.in_place;
  } else {
    try {
      part.slot_bytes = std::max<size_t>(operation.bytes(), 1);
      part.slot = region_.allocate(part.slot_bytes);
      copy_in(*flight, part);
    } catch (const Error& error) {
      part.slot_bytes = 0;
      refusal = error.what();
    }
  }
  offer.name = &request.name;
  offer.signature = &request.signature;
  offer.refusal = refusal.empty() ? nullptr : &refusal;
  offer.operation = operation;
  offer.slot = part.slot;
  offer.chunks = transport_->pieces(operation);
  const Arrival arrival =
      rendezvous_.arrive(offer, may_run_inline ? transport_->inline_limit() : 0, [&](const Arrival& a) {
        part.entry = a.entry;
        part.generation = a.generation;
        std::lock_guard<std::mutex> lock(mutex_);
        ++flight->under_way;
        staged_bytes_ += part.slot_bytes;
        parts_[a.entry] = part;
      });
  if (arrival.table_full || arrival.departed) {
    if (part.slot_bytes > 0) region_.release(part.slot, part.slot_bytes);
    if (arrival.table_full) return false;
    part.slot_bytes = 0;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ++flight->under_way;
    }
    account(part, "'" + request.name + "': " + rendezvous_.departed_text());
    return true;
  }
  if (arrival.last) transport_->run_whole(arrival.entry);
  if (arrival.last || arrival.failed) {
    // Unless the thread has seen the news already.
    Part mine;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto it = parts_.find(arrival.entry);
      if (it == parts_.end() || it->second.generation != arrival.generation) return true;
      mine = it->second;
      parts_.erase(it);
    }
    finish_part(mine, rendezvous_.entry(arrival.entry).error);
  }
  return true;
}

void Runtime::copy_in(const Flight& flight, const Part& part) const {
  const Request& request = flight.request;
  const Operation& op = request.operation;
  if (op.kind == Kind::broadcast && op.root != world_.rank()) return;
  const size_t offset = part.begin * item_size(op.dtype);
  void* slot = world_.segment().base() + part.slot;
  if (op.kind == Kind::broadcast || request.inputs.size() == 1) {
    copy(slot, static_cast<const char*>(request.inputs[0]) + offset, part.count * item_size(op.dtype), false);
    return;
  }
  std::vector<const void*> inputs;
  for (const void* input : request.inputs) inputs.push_back(static_cast<const char*>(input) + offset);
  reduce(op.dtype, op.reduce_op, inputs.data(), static_cast<int>(inputs.size()), &slot, 1, part.count, 1.0, false);
}

void Runtime::copy_out(const Flight& flight, const Part& part) const {
  const size_t width = item_size(flight.request.operation.dtype);
  const char* slot = world_.segment().base() + part.slot;
  for (void* output : flight.request.outputs) {
    copy(static_cast<char*>(output) + part.begin * width, slot, part.count * width, false);
  }
}

void Runtime::finish_part(const Part& part, const std::string& error) {
  const bool in_slot = !part.flight->request.in_place && part.share.output == nullptr;
  if (error.empty() && in_slot) copy_out(*part.flight, part);
  if (part.slot_bytes > 0) region_.release(part.slot, part.slot_bytes);
  try {
    rendezvous_.leave(part.entry);
  } catch (const Error&) {
    account(part, error);
    throw;
  }
  account(part, error);
}

// Counts a part as finished, and the flight with its last one.
void Runtime::account(const Part& part, const std::string& error) {
  Flight& flight = *part.flight;
  bool over;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    staged_bytes_ -= part.slot_bytes;
    --flight.under_way;
    ++flight.finished;
    if (error.empty()) flight.agreed = true;
    if (flight.error.empty()) flight.error = error;
    const bool dropped = !flight.error.empty() && !flight.agreed;  // no rank sends more of it
    over = !flight.ended && flight.under_way == 0 && (dropped || flight.finished == flight.parts);
    flight.ended = flight.ended || over;
  }
  if (over) flight.request.done(flight.error.empty() ? nullptr : &flight.error);
}

void Runtime::run() {
  prctl(PR_SET_NAME, "mykv");
  prctl(PR_SET_TIMERSLACK, 1000UL);  // 1 us instead of 50: short sleeps between looks at the network
  try {
    Bell& bell = rendezvous_.bell(world_.local_rank());
    Clock::time_point last_work = Clock::now();
    for (;;) {
      const uint32_t seen = bell.count();
      const bool stopping = stopping_.load();  // before the work, which then includes telling the other hosts
      if (work()) {
        if (stopping) last_work = Clock::now();
        continue;
      }
      if (stopping) {
        std::lock_guard<std::mutex> lock(mutex_);
        const bool nothing_left = parts_.empty() && !transport_->polling() && !agreement_.sending();
        if (nothing_left || Clock::now() - last_work > kLeavePatience) break;
      } else {
        last_work = Clock::now();
      }
      sleep(seen);
    }
    end_all("this rank has shut mykv down");
  } catch (const std::exception& error) {
    break_down(error.what());
  }
}

// The thread cannot go on: nobody may wait for this rank any more.
void Runtime::break_down(const std::string& reason) {
  std::vector<uint32_t> entries;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = reason;
    for (const auto& [entry, part] : parts_) entries.push_back(entry);
  }
  try {
    rendezvous_.depart(world_.rank(), reason);
    for (uint32_t entry : entries) rendezvous_.fail(entry, reason);
    tell_departure();
  } catch (const std::exception&) {
    // Then the shared table or MPI is beyond use, which the others see themselves.
  }
  end_all(reason);
}

void Runtime::tell_departure() {
  if (!agreement_.speaks() || departure_told_ || rendezvous_.departed_rank() < 0) return;
  departure_told_ = true;
  agreement_.depart(rendezvous_.departed_rank(), rendezvous_.departure());
}

bool Runtime::work() {
  bool worked = take_posted();
  worked |= take_events();
  worked |= take_finished();
  worked |= start_parts();
  worked |= transport_->progress();
  if (agreement_.speaks()) {
    worked |= agreement_.progress();
    tell_departure();
  }
  return worked;
}

void Runtime::sleep(uint32_t seen) {
  int64_t limit = kSleepUs;
  if (agreement_.speaks()) limit = kIdlePollUs;
  if (!waiting_.empty()) limit = kRetryUs;
  if (transport_->polling() || agreement_.polling()) limit = kPollUs;
  if (stopping_.load()) limit = std::min(limit, kRetryUs);
  rendezvous_.bell(world_.local_rank()).wait(seen, limit);
}

bool Runtime::take_posted() {
  std::deque<std::shared_ptr<Flight>> posted;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    posted.swap(posted_);
  }
  for (auto& flight : posted) waiting_.emplace(-int64_t{flight->request.operation.priority}, flight);
  return !posted.empty();
}

bool Runtime::take_events() {
  Event event;
  bool overrun = false;
  bool any = false;
  while (rendezvous_.next_event(&event, &overrun)) {
    any = true;
    if (overrun) {
      rescan();
    } else {
      handle_event(event);
    }
  }
  return any;
}

void Runtime::handle_event(const Event& event) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto it = parts_.find(event.entry);
  if (it == parts_.end() || it->second.generation != event.generation) return;
  Part& part = it->second;
  switch (event.type) {
    case Event::Type::announced:
      if (!agreement_.speaks() || std::exchange(part.announced, true)) return;
      lock.unlock();
      agreement_.announce(event.entry);
      return;
    case Event::Type::ready:
      part.flight->agreed = true;
      if (std::exchange(part.started, true)) return;
      {
        const Share share = part.share;
        lock.unlock();
        transport_->start(event.entry, share);
      }
      return;
    case Event::Type::done:
      finished_.emplace_back(part, rendezvous_.entry(event.entry).error);
      parts_.erase(it);
      lock.unlock();
      transport_->stop(event.entry);
      return;
  }
}

// The log was overwritten before this rank read it: what happened is read off the entries themselves.
void Runtime::rescan() {
  std::vector<Event> events;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [entry, part] : parts_) events.push_back({Event::Type::done, entry, part.generation});
  }
  for (Event& event : events) {
    const State state = rendezvous_.state(event.entry);
    if (state == State::gathering || state == State::taken) continue;
    if (state == State::announced) event.type = Event::Type::announced;
    if (state == State::ready) event.type = Event::Type::ready;
    handle_event(event);
  }
}

bool Runtime::take_finished() {
  if (finished_.empty()) return false;
  auto [part, error] = std::move(finished_.front());
  finished_.pop_front();
  finish_part(part, error);
  return true;
}

// Sends the first part that may go, in the order of priorities.
bool Runtime::start_parts() {
  for (auto it = waiting_.begin(); it != waiting_.end(); ++it) {
    const std::shared_ptr<Flight> flight = it->second;
    size_t number;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      number = flight->next;
      if (number == flight->parts || (!flight->error.empty() && !flight->agreed)) {
        waiting_.erase(it);
        return true;
      }
      const bool room = flight->under_way == 0 || staged_bytes_ + options_.part_bytes <= options_.staging_bytes;
      if (number > 0 && !(flight->agreed && room)) continue;
      ++flight->next;
    }
    if (send_part(flight, number, false)) return true;
    // The table is full; a later flight may still find its entry there.
    std::lock_guard<std::mutex> lock(mutex_);
    --flight->next;
  }
  return false;
}

void Runtime::leave(const std::string& reason) {
  if (forked()) {
    // The thread is the parent's: here is nothing to stop.
    if (thread_.joinable()) thread_.detach();
    return;
  }
  std::lock_guard<std::mutex> leaving(leave_mutex_);
  if (!thread_.joinable()) return;
  bool broken;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    broken = !stopped_.empty();
    if (!broken) stopped_ = "this rank has left: " + reason;
  }
  try {
    if (world_.size() > 1 && !broken) rendezvous_.depart(world_.rank(), reason);
  } catch (const Error&) {
    // The table is unusable because a rank died; the others get that error themselves.
  }
  stopping_.store(true);
  rendezvous_.bell(world_.local_rank()).ring();
  thread_.join();
}

// Ends everything this rank still has, without the help of others.
void Runtime::end_all(const std::string& reason) {
  std::vector<std::shared_ptr<Flight>> flights;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopped_.empty()) stopped_ = reason;
    for (auto& [entry, part] : parts_) flights.push_back(part.flight);
    for (auto& [part, text] : finished_) flights.push_back(part.flight);
    for (auto& flight : posted_) flights.push_back(flight);
    for (auto& [priority, flight] : waiting_) flights.push_back(flight);
    flights.erase(std::remove_if(flights.begin(), flights.end(), [](auto& f) { return std::exchange(f->ended, true); }),
                  flights.end());
    parts_.clear();
    posted_.clear();
  }
  finished_.clear();
  waiting_.clear();
  for (auto& flight : flights) {
    const std::string text = "'" + flight->request.name + "': " + reason;
    flight->request.done(&text);
  }
}

}  // namespace mykv
