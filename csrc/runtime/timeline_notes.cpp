#include "runtime/timeline_notes.h"

#include <algorithm>

#include "base/clock.h"
#include "base/text.h"
#include "operations/signature.h"

namespace mykv {

namespace {

PartRecord::Interval between(const Stamps& stamps, Stamp from, Stamp to) {
  return stamps.get(from) != 0 && stamps.get(to) != 0 ? PartRecord::Interval{stamps.get(from), stamps.get(to)}
                                                      : PartRecord::Interval{};
}

// From the start of the first chunk to the end of the last: on one host several ranks may have reduced chunks of the
// part.
PartRecord::Interval reduced_on_host(const Entry& entry, size_t ranks) {
  PartRecord::Interval all;
  for (size_t r = 0; r < ranks; ++r) {
    if (entry.arrival_stamp(r) == 0) continue;
    const PartRecord::Interval one = between(entry.records()[r].stamps, Stamp::begun, Stamp::finished);
    if (one.begin == 0) continue;
    all = all.begin == 0 ? one : PartRecord::Interval{std::min(all.begin, one.begin), std::max(all.end, one.end)};
  }
  return all;
}

}  // namespace

void TimelineNotes::begin(RequestState& posted) {
  if (Timeline::on()) posted.record = Timeline::instance().record();
  posted.recorded = posted.record != nullptr;
  if (posted.recorded) posted.begun = posted.record->begin;
}

void TimelineNotes::end(const Part& part, const PartRecord::Interval& copied_out) {
  const Entry& entry = table_.entry(part.entry);
  const Stamps& mine = entry.records()[world_.local_rank()].stamps;
  PartRecord times;
  times.number = static_cast<uint32_t>(part.number);
  if (part.copied_in != 0) times.copy_in = {part.copied_in, mine.get(Stamp::arrived)};
  times.copy_out = copied_out;
  bool all = true;
  int64_t last = 0;
  for (size_t r = 0; r < table_.ranks().size(); ++r) {
    const int64_t time = entry.arrival_stamp(r);
    all = all && time != 0;
    last = std::max(last, time);
  }
  if (mine.get(Stamp::arrived) != 0) {
    if (world_.has_several_hosts()) {
      times.wait = {mine.get(Stamp::arrived), part.hosts.agreed != 0 ? part.hosts.agreed : now_ns()};
      times.reduce = between(mine, Stamp::begun, Stamp::scatter);
      if (mine.get(Stamp::scattered) != 0) {
        times.scatter = between(mine, Stamp::scatter, Stamp::scattered);
        times.reduce_all = between(mine, Stamp::scattered, Stamp::gather);
        times.gather = between(mine, Stamp::gather, Stamp::gathered);
      } else {
        times.gather = between(mine, Stamp::scatter, Stamp::gathered);
      }
      times.spread = between(mine, Stamp::gathered, Stamp::finished);
    } else {
      times.wait = {mine.get(Stamp::arrived), all ? last : now_ns()};
      times.reduce = reduced_on_host(entry, table_.ranks().size());
    }
  }
  add(part, times, entry);
}

void TimelineNotes::add(const Part& part, PartRecord times, const Entry& entry) {
  std::lock_guard<std::mutex> lock(mutex_);
  RequestRecord* const record = part.posted->record.get();
  if (record == nullptr) return;
  if (record->parts.empty()) {
    record->parts.reserve(part.posted->parts);
    record->arrivals.reserve(part.posted->parts *
                             (static_cast<size_t>(world_.local_size()) + part.hosts.arrivals.size()));
  }
  times.arrivals = static_cast<uint32_t>(record->arrivals.size());
  for (size_t r = 0; r < table_.ranks().size(); ++r) {
    const int64_t time = entry.arrival_stamp(r);
    if (time == 0) continue;
    record->arrivals.push_back({table_.ranks()[r], time});
    ++times.ranks;
  }
  record->arrivals.insert(record->arrivals.end(), part.hosts.arrivals.begin(), part.hosts.arrivals.end());
  times.hosts = static_cast<uint32_t>(part.hosts.arrivals.size());
  record->parts.push_back(times);
}

void TimelineNotes::end(RequestState& posted, const Failure* error) {
  std::unique_ptr<RequestRecord> record;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    record = std::move(posted.record);
  }
  if (!record) return;
  const int64_t copied_out = record->parts.empty() ? 0 : record->parts.back().copy_out.end;
  record->end = error == nullptr && copied_out != 0 ? copied_out : now_ns();
  record->name = posted.request.name;
  record->signature = shown(posted.request.signature);
  if (error != nullptr) record->error = readable(error->text);
  record->bytes = posted.request.operation.bytes();
  record->turn = posted.request.turn;
  record->priority = posted.request.operation.priority;
  record->parts_planned = posted.parts;
  Timeline::instance().add(std::move(record));
}

void TimelineNotes::awake(int64_t since) const {
  constexpr int kNamed = 8;
  std::string thread = "runtime thread of ";
  if (world_.size() <= kNamed) {
    thread += world_.size() == 1 ? "rank" : "ranks";
    for (int r = 0; r < world_.size(); ++r) thread += " " + std::to_string(world_.label(r));
  } else {
    thread += std::to_string(world_.size()) + " ranks";
  }
  Timeline::instance().add(AwakeRecord{Timeline::instance().session(), std::move(thread), since, now_ns()});
}

}  // namespace mykv
