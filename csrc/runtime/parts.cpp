// The life of a part: sent to the host's table with this rank's share, finished with the result. (The thread and the
// rest of Runtime are in runtime.cpp.)
#include <algorithm>

#include "base/clock.h"
#include "base/error.h"
#include "kernels/kernels.h"
#include "operations/ranges.h"
#include "operations/signature.h"
#include "runtime/runtime.h"

namespace mykv {

namespace {

constexpr auto kStandstill = std::chrono::milliseconds(1);
// In one call, when the host's table is full:
constexpr int kLooks = 32;  // requests to look at, for entries that other ranks have made
constexpr int kOldest = 8;  // oldest requests that may find no room

// The memory of a part, if the kernels can work on the arrays in place: one input and one output, aligned to the item
// size. Otherwise the share is empty.
LocalShare share_of(const Request& request, const Part& part) {
  const size_t width = item_size(request.operation.dtype);
  const size_t offset = part.begin * width;
  LocalShare share;
  if (request.scattered) {
    share.input = one_place(request.sources, range_of(part), width);
    share.output = one_place(request.targets, range_of(part), width);
  } else if (request.inputs.size() == 1 && request.outputs.size() == 1) {
    share.input = static_cast<const char*>(request.inputs[0]) + offset;
    share.output = static_cast<char*>(request.outputs[0]) + offset;
  }
  const bool fits = share.input != nullptr && share.output != nullptr &&
                    reinterpret_cast<uintptr_t>(share.input) % width == 0 &&
                    reinterpret_cast<uintptr_t>(share.output) % width == 0;
  return fits ? share : LocalShare();
}

}  // namespace

// Whether another slot may be taken. Beyond the limit, slots would leave the cache before they are used. But each rank
// may have filled its limit with parts for which other ranks have no room: a deadlock. So the limit grows while all
// parts of this rank wait for other ranks. While a part is under way, room will come.
bool Runtime::has_room() {
  std::lock_guard<std::mutex> lock(mutex_);
  const Clock::time_point now = Clock::now();
  const size_t needed = staged_bytes_ + options_.part_bytes;
  if (needed <= options_.staging_bytes) {
    moved_ = now;
    return true;
  }
  if (moving_parts_ > 0) return false;
  return needed <= options_.staging_bytes * (1 + static_cast<size_t>((now - moved_) / kStandstill));
}

// Notes that the host's table has no room for this request, and so for no other; null: it has room.
void Runtime::set_crowded_out(const RequestState* posted) {
  if ((posted != nullptr) == (crowded_out_since_ != 0)) return;
  std::lock_guard<std::mutex> lock(mutex_);
  crowded_out_since_ = posted != nullptr ? coarse_now_ns() : 0;
  crowded_out_ = posted != nullptr ? posted->request.name : std::string();
}

// All ranks bring the later parts of a request, sooner or later, but the later parts of many requests could fill the
// table. Between hosts, which send requests in different orders, they would take room from each other: so the later
// parts of one request must be due on all hosts, the request that was agreed on first.
Due Runtime::due(const RequestState& posted, size_t number) const {
  const std::shared_ptr<const Ticket>& ticket = posted.request.ticket;
  if (!ticket) return Due::now;
  if (number == 0) return ticket->within(table_.window()) ? Due::now : Due::ahead;
  const bool first = world_.hosts().size() > 1 ? waiting_.is_first_agreed(posted) : ticket->within(0);
  return first ? Due::now : Due::agreed;
}

// Sends the first part that may go, in the order of priorities. When the host's table is full, this can be a part whose
// entry another rank has made, of which this rank hears; a part of the oldest requests, for which entries are kept; or
// any part once entries are freed. Each call tries a few requests from where the last call stopped: trying all of them
// for each part that goes would be quadratic.
bool Runtime::start_parts() {
  blocked_ = staged_->gated = false;
  if (waiting_.empty()) {
    if (listening_) listen();
    return false;
  }
  const bool room = has_room();
  if (listening_ && (start_offered(room) || start_oldest(room))) return true;
  int looks = kLooks;
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    const auto here = it++;
    switch (start_next(here, room)) {
      case Start::sent:
        return true;
      case Start::not_yet:
        continue;
      case Start::no_room:
        blocked_ = true;
        return false;
      case Start::no_place:
        if (!listening_) listen();
        if (!std::exchange(blocked_, true) && waiting_.look() != waiting_.end()) it = waiting_.look();
        waiting_.look_next(it);
        if (--looks == 0) return false;
    }
  }
  if (blocked_) waiting_.look_next(waiting_.end());
  return false;
}

// Begins or ends listening for entries that other ranks make.
void Runtime::listen() {
  listening_ = !listening_;
  table_.listen(listening_);
  if (listening_) {
    waiting_.index();
    offer_all();
  } else {
    waiting_.forget_index();
    offered_.clear();
  }
}

// Other ranks may have made entries without this rank's knowledge. So every waiting request is offered.
void Runtime::offer_all() {
  offered_.clear();
  for (const auto& [priority, posted] : waiting_) offered_.push_back(SendQueue::key_of(*posted));
}

// True if a part was sent or there is more to look at.
bool Runtime::start_offered(bool room) {
  for (int looks = kLooks; !offered_.empty() && looks > 0; --looks) {
    const SendQueue::Place place = waiting_.find(offered_.front());
    const Start start = place == waiting_.end() ? Start::not_yet : start_next(place, room);
    if (start == Start::no_room) return false;
    if (start == Start::sent) return true;  // the key stays, since the request may have more parts
    offered_.pop_front();
  }
  return !offered_.empty();
}

bool Runtime::start_oldest(bool room) {
  int looks = kLooks, refused = kOldest;
  for (auto it = waiting_.by_age().begin(); it != waiting_.by_age().end() && looks > 0 && refused > 0; ++it, --looks) {
    const Start start = start_next(it->second, room);
    if (start == Start::sent) return true;
    refused -= start == Start::no_place;
  }
  return false;
}

// Sends the next part of a request, or drops the request if there is none.
Runtime::Start Runtime::start_next(SendQueue::Place place, bool room) {
  const std::shared_ptr<RequestState> posted = place->second;
  const Request& request = posted->request;
  if (request.operation.road == Road::staged && awaits_device(*posted)) {
    staged_->gated = true;
    return Start::not_yet;
  }
  size_t number;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    number = posted->next;
    if (number == posted->parts || (!posted->error.empty() && !posted->agreed)) {
      waiting_.erase(place);
      return Start::sent;
    }
    if (number > 0 && !posted->agreed) return Start::not_yet;
    if (!room && !request.in_place && request.operation.road != Road::nccl && request.refusal.empty()) {
      return Start::no_room;
    }
    ++posted->next;
  }
  // Looked up before the share is copied.
  const bool no_place = (listening_ || crowded_out_since_ != 0) &&
                        !table_.has_place(make_key(request.name, request.turn, number), due(*posted, number));
  if (!no_place && send_part(posted, number, false)) {
    set_crowded_out(nullptr);
    if (number + 1 == posted->parts) waiting_.erase(place);
    return Start::sent;
  }
  set_crowded_out(posted.get());
  std::lock_guard<std::mutex> lock(mutex_);
  --posted->next;
  return Start::no_place;
}

// Copies the share of one part and brings it to the host's table; false when the table is full.
bool Runtime::send_part(const std::shared_ptr<RequestState>& posted, size_t number, bool may_run_inline) {
  const Request& request = posted->request;
  Part part;
  part.posted = posted;
  const Piece piece = posted->piece(number);
  part.number = number;
  part.begin = piece.begin;
  part.count = piece.count;
  std::string refusal = request.refusal;
  {
    // The other ranks may have sent parts after a part that failed here, and wait for all of them.
    std::lock_guard<std::mutex> lock(mutex_);
    if (refusal.empty()) refusal = posted->error.text;
  }
  Operation operation = request.operation;
  operation.count = part.count;
  operation.root = piece.root;
  if (operation.road == Road::staged && refusal.empty()) {
    begin_copy_in(std::move(part), operation);
    return true;
  }
  Transport& transport = transport_of(operation);
  const int32_t owner = transport.owner(operation, posted->number + number);
  if (owner == world_.local_rank() && !request.in_place) part.share = share_of(request, part);
  if (!refusal.empty() || part.share.input != nullptr) {
    // There is nothing to copy into a slot.
  } else if (operation.road == Road::nccl) {
    part.share.request = &request;
    try {
      part.placement = nccl_->prepare(request);
    } catch (const Error& error) {
      refusal = error.what();
    }
  } else if (request.in_place) {
    part.slot = *request.in_place + part.begin * item_size(operation.dtype);
  } else if (transport.taken_from_root(operation) && operation.root != world_.rank()) {
    part.share.take = [this, posted, begin = part.begin, count = part.count](const char* slot) {
      copy_out(posted->request, begin, count, slot);
    };
  } else {
    try {
      part.slot_bytes = std::max<size_t>(operation.bytes(), 1);
      part.slot = region_.allocate(part.slot_bytes);
      if (posted->recorded) part.copied_in = may_run_inline ? posted->begun : now_ns();
      copy_in(request, operation, part);
    } catch (const Error& error) {
      part.slot_bytes = 0;
      refusal = error.what();
    }
  }
  return meet(part, operation, refusal, may_run_inline);
}

// The part arrives in the host's table, with its share or a refusal; false when the table is full.
bool Runtime::meet(Part& part, const Operation& operation, const std::string& refusal, bool may_run_inline) {
  const std::shared_ptr<RequestState>& posted = part.posted;
  const Request& request = posted->request;
  if (operation.compressor != nullptr && refusal.empty() && world_.hosts().size() > 1) {
    part.share.compression = compressions_.of(request.name, part.number, operation, request.operation.count);
  }
  HostTable::Arriving offer;
  offer.key = part.key = make_key(request.name, request.turn, part.number);
  Transport& transport = transport_of(operation);
  offer.owner = transport.owner(operation, posted->number + part.number);
  offer.placement = part.placement;
  offer.name = &request.name;
  offer.signature = &request.signature;
  offer.refusal = refusal.empty() ? nullptr : &refusal;
  offer.operation = operation;
  offer.slot = part.slot;
  offer.chunks = transport.pieces(operation);
  offer.first = part.number == 0 ? offer.key : make_key(request.name, request.turn, 0);
  offer.due = due(*posted, part.number);
  ArriveResult arrival;
  bool claimed = false;
  try {
    arrival = table_.arrive(offer, may_run_inline ? transport.inline_limit() : 0, [&](const ArriveResult& a) {
      part.entry = a.entry;
      part.generation = a.generation;
      part.large = operation.bytes() > kPostInlineBytes;
      part.since = coarse_now_ns();
      std::lock_guard<std::mutex> lock(mutex_);
      large_parts_ += part.large;
      if (!part.staged) {
        ++posted->under_way;
        staged_bytes_ += part.slot_bytes;
      }
      parts_[a.entry] = part;
      claimed = true;
    });
    if (arrival.last) transport.run_whole(arrival.entry);
  } catch (const Error&) {
    // The table was given up, and the thread is about to break down.
    if (!claimed || withdraw(part)) throw;
    return true;
  }
  if (arrival.table_full || arrival.departed) {
    if (arrival.table_full && part.staged) return false;  // a staged part keeps its slot
    release_slot(part);
    if (arrival.table_full) return false;
    if (!part.staged) {
      part.slot_bytes = 0;
      std::lock_guard<std::mutex> lock(mutex_);
      ++posted->under_way;
    }
    account(part, shown_name(request.name) + ": " + table_.departed().cause());
    return true;
  }
  // No lock: only the runtime's thread sends requests of several parts.
  if (posted->parts > 1 && ++posted->met == posted->parts) waiting_.forget(*posted);
  if (may_run_inline && !arrival.last && !arrival.failed && operation.bytes() <= transport.inline_limit() &&
      waits_.expect_bell()) {
    table_.bell(world_.local_rank()).ring();
  }
  if (arrival.last || arrival.failed) {
    // Unless the runtime's thread has read the event and taken the part already.
    Part mine;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto it = parts_.find(arrival.entry);
      if (it == parts_.end() || it->second.generation != arrival.generation) return true;
      mine = it->second;
      parts_.erase(it);
    }
    finish_part(mine, table_.entry(arrival.entry).error.get());
  }
  return true;
}

// Takes a part back after the table was given up, so that the thread does not touch its arrays any more; false if the
// thread has started the part or taken it, and will end it.
bool Runtime::withdraw(const Part& part) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = parts_.find(part.entry);
  if (it == parts_.end() || it->second.generation != part.generation || it->second.started) return false;
  parts_.erase(it);
  return true;
}

void Runtime::copy_in(const Request& request, const Operation& op, const Part& part) const {
  if (op.kind == Kind::broadcast && op.root != world_.rank()) return;
  const size_t width = item_size(op.dtype);
  const size_t offset = part.begin * width;
  char* slot = world_.segment().base() + part.slot;
  if (request.scattered) {
    for_overlaps(request.sources, range_of(part), [&](const Source& from, const Range& both) {
      copy(slot + (both.begin - part.begin) * width,
           static_cast<const char*>(from.data) + (both.begin - from.begin) * width, both.count() * width);
    });
    return;
  }
  if (op.kind == Kind::broadcast || request.inputs.size() == 1) {
    copy(slot, static_cast<const char*>(request.inputs[0]) + offset, part.count * width);
    return;
  }
  std::vector<const void*> inputs;
  for (const void* input : request.inputs) inputs.push_back(static_cast<const char*>(input) + offset);
  void* target = slot;
  reduce(op.dtype, op.reduce_op, inputs.data(), static_cast<int>(inputs.size()), &target, 1, part.count, 1.0);
}

// Copies elements [begin, begin + count) of the result from a slot to the request's targets and outputs.
void Runtime::copy_out(const Request& request, size_t begin, size_t count, const char* slot) const {
  const size_t width = item_size(request.operation.dtype);
  for_overlaps(request.targets, Range{begin, begin + count}, [&](const Target& to, const Range& both) {
    copy(static_cast<char*>(to.data) + (both.begin - to.begin) * width, slot + (both.begin - begin) * width,
         both.count() * width);
  });
  for (void* output : request.outputs) {
    copy(static_cast<char*>(output) + begin * width, slot, count * width);
  }
}

void Runtime::release_slot(const Part& part) {
  if (part.slot_bytes == 0) return;
  if (part.staged) {
    staged_->slots.release(part.slot, part.slot_bytes);
  } else {
    region_.release(part.slot, part.slot_bytes);
  }
}

void Runtime::finish_part(const Part& part, const Cause& error) {
  if (part.staged && error.empty()) {
    if (retired_.empty()) {
      begin_copy_out(part);
    } else {
      end_part(part, retired_text(part), {});
    }
    return;
  }
  PartRecord::Interval copied_out;
  if (error.empty() && part.slot_bytes > 0) {
    if (part.posted->recorded) copied_out.begin = now_ns();
    copy_out(part.posted->request, part.begin, part.count, world_.segment().base() + part.slot);
    if (part.posted->recorded) copied_out.end = now_ns();
  }
  end_part(part, error, copied_out);
}

void Runtime::end_part(const Part& part, const Cause& error, const PartRecord::Interval& copied_out) {
  if (part.posted->recorded) record(part, copied_out);  // before leave(), after which the entry may be reused
  release_slot(part);
  try {
    table_.leave(part.entry);
  } catch (const Error&) {
    account(part, error);
    throw;
  }
  account(part, error);
}

// Counts a part as finished; the last part ends the request.
void Runtime::account(const Part& part, const Cause& error) {
  RequestState& posted = *part.posted;
  bool over;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    staged_bytes_ -= part.slot_bytes;
    large_parts_ -= part.large;
    // Small shares pass whether there is room or not, so they do not show that parts which wait for room advance.
    if (part.slot_bytes > kPostInlineBytes) moved_ = Clock::now();
    moving_parts_ -= part.started && part.slot_bytes > kPostInlineBytes;
    --posted.under_way;
    ++posted.finished;
    if (error.empty()) posted.agreed = true;
    if (posted.error.empty()) posted.error = error;
    const bool dropped = !posted.error.empty() && !posted.agreed;  // no rank sends more of its parts
    over = !posted.ended && posted.under_way == 0 && (dropped || posted.finished == posted.parts);
    posted.ended = posted.ended || over;
  }
  if (over) end(posted, posted.error.empty() ? nullptr : &posted.error);
}

}  // namespace mykv
