#include "runtime/part_events.h"

#include <algorithm>
#include <iterator>
#include <optional>

#include "base/clock.h"
#include "base/error.h"

namespace mykv {

namespace {

constexpr int64_t kPartWritersNs = 1000000000;  // how long to wait for ranks that write into a failed part's arrays

}  // namespace

bool PartEvents::take_events() {
  TableEvent event;
  bool overrun = false;
  bool any = false;
  while (context_.table.next_event(&event, &overrun)) {
    any = true;
    if (overrun) {
      rescan();
    } else {
      handle(event);
    }
  }
  return any;
}

void PartEvents::handle(const TableEvent& event) {
  switch (event.type) {
    case TableEvent::Type::made:
      if (!queue_.is_subscribed()) return;
      if (const auto key = context_.table.first_key_of(event)) queue_.add_candidate(*key);
      return;
    case TableEvent::Type::announced:
      return announce(event);
    case TableEvent::Type::ready:
      return start(event);
    case TableEvent::Type::done:
      return finish(event);
  }
}

void PartEvents::announce(const TableEvent& event) {
  if (!context_.agreement.speaks() || !requests_.announce(event.entry, event.generation)) return;
  std::optional<Failure> error = context_.table.announced_error(event.entry);
  if (!error) return;
  const Entry& entry = context_.table.entry(event.entry);
  const Transport& transport = context_.transport_of(entry.operation);
  std::optional<std::vector<char>> carried;
  if (transport.is_carried(entry.operation)) {
    carried.emplace();
    // A failed operation sends no values, since some shares may not be in slots. own_share() is false if a rank of this
    // host has ended the operation; that rank breaks down, and all hosts are told.
    if (error->empty() && !transport.own_share(event.entry, &*carried)) return;
  }
  context_.agreement.announce(event.entry, transport.sequence_numbers(entry.operation), std::move(carried),
                              std::move(*error));
}

void PartEvents::start(const TableEvent& event) {
  bool first = false;
  const std::optional<Part> part = requests_.begin(event.entry, event.generation, &first);
  if (!part) return;
  // Other ranks may have entered the next parts of the request.
  if (queue_.is_subscribed()) queue_.add_candidate(SendQueue::key_of(*part->posted));
  if (!first) return;
  note_agreed(*part);
  const Entry& entry = context_.table.entry(event.entry);
  if (part->posted->recorded && context_.world.has_several_hosts()) {
    requests_.note_hosts(event.entry, event.generation, now_ns(), context_.agreement.take_arrivals(entry.key));
  }
  Transport& transport = context_.transport_of(entry.operation);
  transport.start(event.entry, part->share);
  if (context_.agreement.speaks() && transport.is_carried(entry.operation)) {
    transport.put_result(event.entry, context_.agreement.take_result(entry.key));
  }
}

void PartEvents::finish(const TableEvent& event) {
  bool needed = false;
  std::optional<Part> part = requests_.take(event.entry, event.generation, [&](const Part& of) {
    needed = others_need(of);
    return needed;
  });
  if (needed) throw_failure_of(event.entry);
  if (!part) return;
  const Entry& entry = context_.table.entry(event.entry);
  const bool started = part->started;
  finished_.push_back({std::move(*part), entry.error.get(), now_ns()});
  if (finished_.back().error.empty() && !started) note_agreed(finished_.back().part);
  context_.agreement.done(entry.sequence);
  context_.transport_of(entry.operation).stop(event.entry);
}

// Whether other ranks still need this rank for a part that is done. There are two cases. Another rank has given the
// part up while it is under way here, on GPUs or between hosts, so that the part's memory may still be written. Or the
// other hosts have agreed on the part, and wait for this rank's share.
bool PartEvents::others_need(const Part& part) {
  Entry& entry = context_.table.entry(part.entry);
  if (context_.transport_of(entry.operation).holds(part.entry)) return true;
  const bool is_agreed =
      entry.sequence != 0 && context_.world.has_several_hosts() && entry.operation.road != DataPath::nccl;
  return is_agreed && !entry.error.empty() && !part.started;
}

void PartEvents::throw_failure_of(uint32_t entry) {
  if (context_.table.departed_rank() >= 0) throw context_.table.departed();
  throw Error(context_.table.entry(entry).error.get());
}

// Notes that all hosts have agreed on a part.
void PartEvents::note_agreed(const Part& part) {
  if (!context_.world.has_several_hosts() || part.number > 0) return;
  queue_.agree(*part.posted, context_.table.entry(part.entry).sequence);
}

// The log was overwritten before this rank read it: reads the state of each entry instead.
void PartEvents::rescan() {
  queue_.add_candidates();
  for (const auto& [entry, generation] : requests_.generations()) {
    switch (context_.table.state(entry)) {
      case State::announced:
        handle({TableEvent::Type::announced, entry, generation});
        break;
      case State::ready:
        handle({TableEvent::Type::ready, entry, generation});
        break;
      case State::gathering:
      case State::taken:
        break;
      default:
        handle({TableEvent::Type::done, entry, generation});
    }
  }
}

bool PartEvents::take_finished() {
  for (auto it = finished_.begin(); it != finished_.end(); ++it) {
    if (!it->error.empty() && !context_.table.chunks_ended(it->part.entry) && now_ns() - it->since < kPartWritersNs)
      continue;
    const Finished finished = std::move(*it);
    finished_.erase(it);
    copy_out_and_leave(finished);
    return true;
  }
  return false;
}

void PartEvents::copy_out_and_leave(const Finished& one) {
  if (one.part.staged) {
    device_parts_.copy_out_and_leave(one.part, one.error);
  } else {
    parts_.copy_out_and_leave(one.part, one.error);
  }
}

void PartEvents::find_finished(const std::vector<uint32_t>& entries) {
  for (const uint32_t entry : entries) {
    if (context_.table.state(entry) != State::done || !context_.table.entry(entry).error.empty()) continue;
    std::optional<Part> part = requests_.take(entry);
    if (!part) continue;  // the thread that posted the part finishes it
    finished_.push_back({std::move(*part), {}, now_ns()});
    context_.transport_of(context_.table.entry(entry).operation).stop(entry);
  }
}

void PartEvents::complete_results() {
  const auto failed =
      std::stable_partition(finished_.begin(), finished_.end(), [](const Finished& one) { return one.error.empty(); });
  const std::vector<Finished> results(std::make_move_iterator(finished_.begin()), std::make_move_iterator(failed));
  finished_.erase(finished_.begin(), failed);
  for (const Finished& one : results) {
    try {
      copy_out_and_leave(one);
    } catch (const Error&) {
      // The verdict on the table came later; the result is still valid.
    }
  }
}

void PartEvents::add_requests(std::vector<std::shared_ptr<RequestState>>* to) const {
  for (const Finished& one : finished_) to->push_back(one.part.posted);
}

}  // namespace mykv
