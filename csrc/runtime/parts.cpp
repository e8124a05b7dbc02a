#include "runtime/parts.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "base/clock.h"
#include "base/error.h"
#include "base/text.h"
#include "kernels/kernels.h"
#include "operations/request.h"
#include "operations/signature.h"

namespace mykv {

namespace {

constexpr size_t kMostText = 16 << 10;  // bytes of a signature or refusal that other ranks can read

// The memory of a part, if the kernels can work on the arrays in place: one input and one output, aligned to the item
// size. Otherwise the share is empty.
LocalShare share_of(const Request& request, const Part& part) {
  const size_t width = item_size(request.operation.dtype);
  const size_t offset = part.begin * width;
  LocalShare share;
  if (request.scattered) {
    share.input = one_span(request.sources, range_of(part), width);
    share.output = one_span(request.targets, range_of(part), width);
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

Part Parts::make(const std::shared_ptr<RequestState>& posted, size_t number) {
  Part part;
  part.posted = posted;
  const Piece piece = posted->piece(number);
  part.number = number;
  part.begin = piece.begin;
  part.count = piece.count;
  return part;
}

Operation Parts::operation_of(const Part& part) {
  Operation operation = part.posted->request.operation;
  operation.count = part.count;
  operation.root = part.posted->piece(part.number).root;
  operation.has_concurrent_roots = operation.has_concurrent_roots || part.posted->request.shards != nullptr;
  return operation;
}

// All ranks will enter the later parts of a request, but the later parts of many requests could fill the table. Hosts
// send requests in different orders, so their later parts could block each other. Therefore the later parts of only
// one request are due, and all hosts choose the same request: the request that was agreed on first.
EntryQuota Parts::due(const RequestState& posted, size_t number) const {
  const std::shared_ptr<const Ticket>& ticket = posted.request.ticket;
  if (!ticket) return EntryQuota::now;
  if (number == 0) return ticket->within(context_.table.window()) ? EntryQuota::now : EntryQuota::ahead;
  const bool first = context_.world.has_several_hosts() ? queue_.is_first_agreed(posted) : ticket->within(0);
  return first ? EntryQuota::now : EntryQuota::agreed;
}

bool Parts::send(const std::shared_ptr<RequestState>& posted, size_t number, std::string refusal, bool posting) {
  Part part = make(posted, number);
  const Operation operation = operation_of(part);
  const int32_t owner = context_.transport_of(operation).owner(operation, posted->number + number);
  if (owner == context_.world.local_rank() && !posted->request.in_place) part.share = share_of(posted->request, part);
  if (refusal.empty() && part.share.input == nullptr) refusal = take_share(part, operation, posting);
  const Arrived arrived = arrive(part, operation, refusal, posting);
  if (arrived == Arrived::over) copy_out_and_leave(part, context_.table.entry(part.entry).error.get());
  return arrived != Arrived::table_full;
}

// Gives the part its share: a slot with its elements, or a substitute. Returns the error; empty: none.
std::string Parts::take_share(Part& part, const Operation& operation, bool posting) {
  const std::shared_ptr<RequestState>& posted = part.posted;
  const Request& request = posted->request;
  try {
    if (operation.road == DataPath::nccl) {
      part.share.request = &request;
      part.placement = context_.nccl->prepare(request);
    } else if (request.in_place) {
      part.slot = *request.in_place + part.begin * item_size(operation.dtype);
    } else if (context_.transport->taken_from_root(operation) && operation.root != context_.world.rank()) {
      part.share.take = [this, posted, begin = part.begin, count = part.count](const char* slot) {
        copy_out(posted->request, begin, count, slot);
      };
    } else {
      const size_t bytes = std::max<size_t>(operation.bytes(), 1);
      part.slot = context_.region.allocate(bytes);
      part.slot_bytes = bytes;
      if (posted->recorded) part.copied_in = posting ? posted->begun : now_ns();
      copy_in(request, operation, part);
    }
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

HostTable::Arriving Parts::arriving_of(const Part& part, const Operation& operation, const std::string& refusal,
                                       bool posting) const {
  const Request& request = part.posted->request;
  const Transport& transport = context_.transport_of(operation);
  HostTable::Arriving arriving;
  arriving.key = part.key;
  arriving.owner = transport.owner(operation, part.posted->number + part.number);
  arriving.placement = part.placement;
  arriving.name = &request.name;
  arriving.signature = &request.signature;
  arriving.refusal = refusal.empty() ? nullptr : &refusal;
  arriving.long_text = part.long_text;
  arriving.operation = operation;
  arriving.slot = part.slot;
  arriving.pieces_to_finish = transport.pieces(operation);
  arriving.first = part.number == 0 ? arriving.key : make_key(request.name, request.turn, 0);
  arriving.due = due(*part.posted, part.number);
  arriving.came = part.came;
  arriving.ends_step = request.step == StepPhase::last && part.number == 0;
  arriving.awaited = request.awaited && context_.world.has_several_hosts();
  arriving.posting = posting;
  arriving.first_of_several = part.number == 0 && part.posted->parts > 1;
  return arriving;
}

Parts::Arrived Parts::arrive(Part& part, const Operation& operation, const std::string& refusal, bool posting) {
  RequestState& posted = *part.posted;
  const Request& request = posted.request;
  if (operation.compressor != nullptr && refusal.empty() && context_.world.has_several_hosts()) {
    part.share.compression = compressions_.of(request.name, part.number, operation, request.operation.count);
  }
  part.key = make_key(request.name, request.turn, part.number);
  const Transport& transport = context_.transport_of(operation);
  // A long text is shown only for the first part of an operation, and for refusals.
  if (part.number == 0 || !refusal.empty()) put_text(part, refusal.empty() ? request.signature : refusal);
  part.came = now_ns();
  ArriveResult arrival;
  bool claimed = false;
  try {
    arrival = context_.table.arrive(arriving_of(part, operation, refusal, posting),
                                    posting ? transport.inline_limit() : 0, [&](const ArriveResult& a) {
                                      part.entry = a.entry;
                                      part.generation = a.generation;
                                      part.large = operation.bytes() > kPostInlineBytes;
                                      part.since = coarse_now_ns();
                                      requests_.add(part);
                                      claimed = true;
                                    });
    if (arrival.last) transport.run_whole(arrival.entry);
  } catch (const TableLocked&) {
    if (claimed) throw;
    arrival.table_full = true;  // the runtime's thread waits for the lock instead of this thread of MXNet
  } catch (const Error&) {
    // The table has a verdict, and the runtime's thread is about to break down.
    if (!claimed || requests_.withdraw(part)) throw;
    return Arrived::under_way;
  }
  if (arrival.table_full) {
    release_text(part);
    if (!part.staged) release_slot(part);  // a staged part keeps its slot
    return Arrived::table_full;
  }
  if (arrival.departed) {
    release_text(part);
    release_slot(part);
    if (!part.staged) part.slot_bytes = 0;
    requests_.add_without_entry(part);
    count(part, shown_name(request.name) + ": " + context_.table.departed().failure(), 0);
    return Arrived::under_way;
  }
  // Needs no lock, since only the runtime's thread sends requests of several parts.
  if (posted.parts > 1 && ++posted.met == posted.parts) queue_.forget(posted);
  const bool ended = arrival.last || arrival.failed;
  const bool soon = posting && !ended && operation.bytes() <= transport.inline_limit() && spin_policy_.expect_bell();
  posted.lingers = soon && request.may_linger;
  if (soon && !request.awaited && !posted.lingers) context_.bell().ring();
  if (!ended) return Arrived::under_way;
  // The runtime's thread may have read the event and taken the part already.
  std::optional<Part> mine = requests_.take(arrival.entry, arrival.generation);
  if (!mine) return Arrived::under_way;
  part = std::move(*mine);
  return Arrived::over;
}

void Parts::copy_in(const Request& request, const Operation& op, const Part& part) const {
  if (op.kind == Kind::broadcast && op.root != context_.world.rank()) return;
  const size_t width = item_size(op.dtype);
  const size_t offset = part.begin * width;
  char* slot = context_.world.segment().base() + part.slot;
  if (request.scattered) {
    for_overlaps(request.sources, range_of(part), [&](const Source& from, const Range& both) {
      copy(slot + (both.begin - part.begin) * width, address_in(from, both.begin, width), both.count() * width);
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
void Parts::copy_out(const Request& request, size_t begin, size_t count, const char* slot) const {
  const size_t width = item_size(request.operation.dtype);
  for_overlaps(request.targets, Range{begin, begin + count}, [&](const Target& to, const Range& both) {
    copy(address_in(to, both.begin, width), slot + (both.begin - begin) * width, both.count() * width);
  });
  for (void* output : request.outputs) {
    copy(static_cast<char*>(output) + begin * width, slot, count * width);
  }
}

// Stores a text that is too long for the table where other ranks can read it.
void Parts::put_text(Part& part, const std::string& text) {
  part.long_text = {};
  if (text.size() < kTextBytes) return;
  const std::string_view kept = beginning(text, kMostText);
  try {
    part.long_text.at = context_.region.allocate(kept.size());
    part.long_text.bytes = static_cast<uint32_t>(kept.size());
    std::memcpy(context_.world.segment().base() + part.long_text.at, kept.data(), kept.size());
  } catch (const Error&) {
    // Without memory the other ranks see only the beginning of the text.
  }
}

void Parts::release_text(const Part& part) {
  if (part.long_text.bytes > 0) context_.region.release(part.long_text.at, part.long_text.bytes);
}

void Parts::release_slot(const Part& part) {
  if (part.slot_bytes == 0) return;
  if (part.staged) {
    context_.pinned.release(part.slot, part.slot_bytes);
  } else {
    context_.region.release(part.slot, part.slot_bytes);
  }
}

void Parts::copy_out_and_leave(const Part& part, const Failure& error) {
  PartRecord::Interval copied_out;
  if (error.empty() && part.slot_bytes > 0) {
    if (part.posted->recorded) copied_out.begin = now_ns();
    copy_out(part.posted->request, part.begin, part.count, context_.world.segment().base() + part.slot);
    if (part.posted->recorded) copied_out.end = now_ns();
  }
  leave_entry(part, error, copied_out);
}

void Parts::leave_entry(const Part& part, const Failure& error, const PartRecord::Interval& copied_out) {
  if (part.posted->recorded) notes_.end(part, copied_out);  // before leave(), after which the entry may be reused
  // Only the first part counts: ranks wait for each other there.
  const bool counts = error.empty() && part.number == 0;
  const int64_t waited =
      counts ? std::max<int64_t>(context_.table.entry(part.entry).arrivals.complete - part.came, 0) : 0;
  release_text(part);
  release_slot(part);
  try {
    context_.table.leave(part.entry);
  } catch (const Error&) {
    count(part, error, waited);
    throw;
  }
  count(part, error, waited);
}

void Parts::count(const Part& part, const Failure& error, int64_t waited_ns) {
  RequestState& posted = *part.posted;
  if (requests_.finish(part, error, waited_ns))
    complete_request(posted, posted.error.empty() ? nullptr : &posted.error);
}

void Parts::complete_request(RequestState& posted, const Failure* error) {
  if (posted.recorded) notes_.end(posted, error);
  posted.request.ticket.reset();
  posted.request.done(error);
}

}  // namespace mykv
