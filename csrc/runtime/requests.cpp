#include "runtime/requests.h"

#include <algorithm>
#include <map>

#include "base/clock.h"
#include "base/error.h"
#include "operations/signature.h"

namespace mykv {

void RequestState::cut(size_t part_bytes) {
  const Operation& op = request.operation;
  part_elements = std::max<size_t>(1, request.in_place ? op.count : part_bytes / item_size(op.dtype));
  if (op.road == DataPath::nccl) {
    part_elements = op.count;  // NCCL divides the request itself
    return;
  }
  if (!request.refusal.empty()) return;  // one part is enough to tell the other ranks
  if (!request.shards) {
    parts = std::max<size_t>(1, (op.count + part_elements - 1) / part_elements);
    return;
  }
  for (const Shard& shard : *request.shards) {
    for (size_t at = 0; at < shard.count; at += part_elements) {
      pieces.push_back({shard.begin + at, std::min(part_elements, shard.count - at), shard.root});
    }
  }
  if (pieces.empty()) pieces.push_back({0, 0, 0});
  parts = pieces.size();
}

Piece RequestState::piece(size_t number) const {
  if (!pieces.empty()) return pieces[number];
  const size_t begin = number * part_elements;
  return {begin, std::min(part_elements, request.operation.count - begin), request.operation.root};
}

namespace {

constexpr auto kStandstill = std::chrono::milliseconds(1);

}  // namespace

void Requests::take_over(const std::shared_ptr<RequestState>& posted, bool direct) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!stopped_.empty()) throw Error(stopped_);
  if (direct) {
    posted->next = 1;
  } else {
    posted_.push_back(posted);
  }
}

Failure Requests::leave_to_thread(const std::shared_ptr<RequestState>& posted) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (posted->ended) return {};
  if (stopped_.empty()) {
    posted->next = 0;
    posted_.push_back(posted);
  }
  return stopped_;
}

std::vector<std::shared_ptr<RequestState>> Requests::take_posted() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(posted_, {});
}

bool Requests::refuse_new(const Failure& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!stopped_.empty()) return false;
  stopped_ = reason;
  return true;
}

bool Requests::refuses_new() {
  std::lock_guard<std::mutex> lock(mutex_);
  return !stopped_.empty();
}

std::string Requests::pending_refusal() {
  std::lock_guard<std::mutex> lock(mutex_);
  const Part* first = nullptr;
  for (const auto& [entry, part] : parts_) {
    if (part.posted->request.refusal.empty()) continue;
    if (first == nullptr || part.came < first->came) first = &part;
  }
  if (first == nullptr) return {};
  return shown_name(first->posted->request.name) + ": " + first->posted->request.refusal;
}

bool Requests::claim_end(RequestState& posted) {
  std::lock_guard<std::mutex> lock(mutex_);
  return !std::exchange(posted.ended, true);
}

std::vector<std::shared_ptr<RequestState>> Requests::close(const Failure& reason,
                                                           std::vector<std::shared_ptr<RequestState>> others) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (stopped_.empty()) stopped_ = reason;
  for (auto& [entry, part] : parts_) others.push_back(part.posted);
  for (auto& posted : posted_) others.push_back(posted);
  others.erase(std::remove_if(others.begin(), others.end(), [](auto& f) { return std::exchange(f->ended, true); }),
               others.end());
  parts_.clear();
  posted_.clear();
  crowded_out_since_ = 0;
  return others;
}

// Beyond the limit, slots would leave the cache before they are used. But all ranks may have filled their limits with
// parts for which other ranks lack room: a deadlock. So the limit grows while all parts of this rank wait for other
// ranks. It does not grow while a part is being reduced, since that part will release its slot.
bool Requests::has_room() {
  std::lock_guard<std::mutex> lock(mutex_);
  const Clock::time_point now = Clock::now();
  const size_t needed = staged_bytes_ + part_bytes_;
  if (needed <= staging_bytes_) {
    moved_ = now;
    return true;
  }
  if (moving_parts_ > 0) return false;
  return needed <= staging_bytes_ * (1 + static_cast<size_t>((now - moved_) / kStandstill));
}

Requests::Next Requests::take_next(RequestState& posted, bool room, size_t* number, std::string* refusal) {
  const Request& request = posted.request;
  std::lock_guard<std::mutex> lock(mutex_);
  if (posted.next == posted.parts || (!posted.error.empty() && !posted.agreed)) return Next::none;
  if (posted.next > 0 && !posted.agreed) return Next::not_yet;
  if (!room && !request.in_place && request.operation.road != DataPath::nccl && request.refusal.empty()) {
    return Next::no_room;
  }
  *number = posted.next++;
  // After a part has failed here, other ranks may have sent later parts, and wait for this rank to send all of them
  // too.
  *refusal = request.refusal.empty() ? posted.error.text : request.refusal;
  return Next::part;
}

void Requests::put_back(RequestState& posted) {
  std::lock_guard<std::mutex> lock(mutex_);
  --posted.next;
}

void Requests::set_crowded_out(const RequestState* posted) {
  if ((posted != nullptr) == (crowded_out_since_ != 0)) return;
  std::lock_guard<std::mutex> lock(mutex_);
  crowded_out_since_ = posted != nullptr ? coarse_now_ns() : 0;
  crowded_out_ = posted != nullptr ? posted->request.name : std::string();
}

void Requests::take_slots(const Part& part, size_t slots) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++part.posted->under_way;
  staged_bytes_ += slots * part.slot_bytes;
}

void Requests::release_bytes(size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  staged_bytes_ -= bytes;
}

void Requests::add(const Part& part) {
  std::lock_guard<std::mutex> lock(mutex_);
  large_parts_ += part.large;
  if (!part.staged) {
    ++part.posted->under_way;
    staged_bytes_ += part.slot_bytes;
  }
  parts_[part.entry] = part;
}

void Requests::add_without_entry(const Part& part) {
  if (part.staged) return;
  std::lock_guard<std::mutex> lock(mutex_);
  ++part.posted->under_way;
}

bool Requests::announce(uint32_t entry, uint32_t generation) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = find(entry, generation);
  return it != parts_.end() && !std::exchange(it->second.announced, true);
}

std::optional<Part> Requests::begin(uint32_t entry, uint32_t generation, bool* first) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = find(entry, generation);
  if (it == parts_.end()) return {};
  Part& part = it->second;
  part.posted->agreed = true;
  *first = !std::exchange(part.started, true);
  if (*first) moving_parts_ += part.slot_bytes > kPostInlineBytes;
  return part;
}

void Requests::note_hosts(uint32_t entry, uint32_t generation, int64_t agreed, std::vector<ArrivalRecord> hosts) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = find(entry, generation);
  if (it == parts_.end()) return;
  it->second.hosts.agreed = agreed;
  it->second.hosts.arrivals = std::move(hosts);
}

std::optional<Part> Requests::take(uint32_t entry, uint32_t generation) {
  return take(entry, generation, [](const Part&) { return false; });
}

std::optional<Part> Requests::take(uint32_t entry) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = parts_.find(entry);
  if (it == parts_.end()) return {};
  return take_out(it);
}

bool Requests::withdraw(const Part& part) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = find(part.entry, part.generation);
  if (it == parts_.end() || it->second.started) return false;
  parts_.erase(it);
  return true;
}

bool Requests::finish(const Part& part, const Failure& error, int64_t waited_ns) {
  RequestState& posted = *part.posted;
  std::lock_guard<std::mutex> lock(mutex_);
  staged_bytes_ -= part.slot_bytes;
  large_parts_ -= part.large;
  // Small shares are sent even without room, so they do not show progress of parts that wait for room.
  if (part.slot_bytes > kPostInlineBytes) moved_ = Clock::now();
  moving_parts_ -= part.started && part.slot_bytes > kPostInlineBytes;
  --posted.under_way;
  ++posted.finished;
  if (error.empty()) posted.agreed = true;
  if (posted.error.empty()) posted.error = error;
  const bool dropped = !posted.error.empty() && !posted.agreed;  // no rank sends more of its parts
  const bool over = !posted.ended && posted.under_way == 0 && (dropped || posted.finished == posted.parts);
  posted.ended = posted.ended || over;
  if (waited_ns > 0) totals_.met(posted.request, waited_ns);
  if (over && posted.error.empty()) totals_.ended(posted.request);
  return over;
}

Totals Requests::totals() {
  std::lock_guard<std::mutex> lock(mutex_);
  return totals_;
}

std::vector<std::pair<uint32_t, uint32_t>> Requests::generations() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::pair<uint32_t, uint32_t>> all;
  for (const auto& [entry, part] : parts_) all.emplace_back(entry, part.generation);
  return all;
}

std::vector<uint32_t> Requests::entries() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<uint32_t> entries;
  for (const auto& [entry, part] : parts_) entries.push_back(entry);
  return entries;
}

bool Requests::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return parts_.empty() && posted_.empty();
}

bool Requests::has_ended(const RequestState& posted) {
  std::lock_guard<std::mutex> lock(mutex_);
  return posted.ended;
}

Requests::Under Requests::under_way() {
  std::lock_guard<std::mutex> lock(mutex_);
  return {!parts_.empty(), large_parts_ > 0};
}

int64_t Requests::oldest(int64_t now) {
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t first = now;
  for (const auto& [entry, part] : parts_) first = std::min(first, part.since);
  if (crowded_out_since_ != 0) first = std::min(first, crowded_out_since_);
  return first;
}

std::vector<Part> Requests::waiting(double least_seconds, const std::string& name, int64_t* now) {
  std::map<const RequestState*, Part> oldest;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    *now = coarse_now_ns();
    for (const auto& [entry, part] : parts_) {
      if (!name.empty() && part.posted->request.name != name) continue;
      if (static_cast<double>(*now - part.since) * 1e-9 < least_seconds) continue;
      const auto [it, is_new] = oldest.emplace(part.posted.get(), part);
      if (!is_new && part.since < it->second.since) it->second = part;
    }
  }
  std::vector<Part> parts;
  for (auto& [posted, part] : oldest) parts.push_back(std::move(part));
  // Refused requests come last: this rank does not wait for them. They stay until the other ranks know the refusal.
  const auto order = [](const Part& part) { return std::pair(!part.posted->request.refusal.empty(), part.since); };
  std::sort(parts.begin(), parts.end(), [&](const Part& a, const Part& b) { return order(a) < order(b); });
  return parts;
}

std::pair<std::string, int64_t> Requests::crowded_out() {
  std::lock_guard<std::mutex> lock(mutex_);
  return {crowded_out_, crowded_out_since_};
}

std::vector<std::pair<Key, Failure>> Requests::named(const std::unordered_map<std::string, Failure>& reasons,
                                                     int64_t came_before) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::pair<Key, Failure>> keys;
  for (const auto& [entry, part] : parts_) {
    const auto found = reasons.find(part.posted->request.name);
    if (found != reasons.end() && part.came <= came_before) keys.emplace_back(part.key, found->second);
  }
  return keys;
}

Requests::ByEntry::iterator Requests::find(uint32_t entry, uint32_t generation) {
  const auto it = parts_.find(entry);
  return it != parts_.end() && it->second.generation == generation ? it : parts_.end();
}

Part Requests::take_out(ByEntry::iterator it) {
  Part part = std::move(it->second);
  parts_.erase(it);
  return part;
}

}  // namespace mykv
