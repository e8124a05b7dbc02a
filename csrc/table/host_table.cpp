#include "table/host_table.h"

#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/planted_faults.h"
#include "base/text.h"
#include "operations/signature.h"

namespace mykv {

namespace {

// A rank's entries are divided into shares: EntryQuota::now and EntryQuota::agreed have one share each.
constexpr uint32_t kShares = 16;
constexpr uint32_t kEntriesStep = 64;            // entries for which memory is committed at a time
constexpr uint32_t kBuckets = 1 << 16;           // number of hash chains
constexpr uint32_t kNone = 0;                    // chains hold index + 1, so that zeroed memory is an empty table
constexpr int64_t kCommitAgainNs = 100000000;    // pause after a lack of memory for entries
constexpr int64_t kHookPatienceNs = 5000000000;  // longest wait for a ReadyHook
constexpr useconds_t kHookPauseUs = 1000;        // between two calls of it: other ranks use the table meanwhile
constexpr int64_t kLookUs = 1000000;             // longest wait of a query for the table's lock
constexpr int64_t kLookNs = 1000000000;          // between two checks of whether the lock's holder has died
constexpr int64_t kBeatNs = 100000000;           // between heartbeats, at least
constexpr int64_t kSilenceNs = 5000000000;       // several times the longest sleep of a rank's thread
constexpr useconds_t kRingsLateUs = 3000000;     // delay of the planted fault `ring`

size_t round_up(size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

void SharedFailure::set(const Failure& failure) {
  clear();
  if (failure.empty()) return;  // the usual case must be quick: the caller holds the table's lock
  code = failure.code;
  std::fill(std::begin(ranks), std::end(ranks), uint64_t{0});
  for (const int rank : failure.ranks) {
    const auto r = static_cast<size_t>(rank);
    if (rank >= 0 && r < kMostRanks) ranks[r / 64] |= uint64_t{1} << r % 64;
  }
  set_text(text, kErrorBytes, failure.text);
}

Failure SharedFailure::get() const {
  if (empty()) return {};
  Failure failure(text, code);
  for (size_t r = 0; r < kMostRanks; ++r) {
    if ((ranks[r / 64] >> r % 64 & 1) != 0) failure.ranks.push_back(static_cast<int>(r));
  }
  return failure;
}

size_t HostTable::bytes(int local_size) {
  const size_t stride = sizeof(Entry) + sizeof(RankRecord) * static_cast<size_t>(local_size);
  const size_t bytes = round_up(sizeof(Header)) +
                       (sizeof(PaddedBell) + sizeof(Lateness)) * static_cast<size_t>(local_size) +
                       transport_bytes(local_size) + round_up(sizeof(uint32_t) * kBuckets) +
                       round_up(EventLog::bytes()) + stride * kEntries;
  return (bytes + 4095) / 4096 * 4096;
}

HostTable::HostTable(const Segment& segment, std::vector<int> ranks, int local_rank, size_t capacity,
                     bool several_hosts)
    : segment_(segment),
      ranks_(std::move(ranks)),
      local_rank_(local_rank),
      several_hosts_(several_hosts),
      cores_(static_cast<uint32_t>(std::max(sysconf(_SC_NPROCESSORS_ONLN), 1L))),
      stride_(sizeof(Entry) + sizeof(RankRecord) * ranks_.size()),
      header_(reinterpret_cast<Header*>(segment.base())),
      lock_(header_->lock, header_->verdict, local_rank,
            {ranks_, [this] { beat(); }, [this] { return unresponsive(); },
             [this] {
               Rings rings;
               rings.all();
               ring(rings);
             }}) {
  char* base = segment.base();
  bells_ = reinterpret_cast<PaddedBell*>(base + round_up(sizeof(Header)));
  lateness_ = reinterpret_cast<Lateness*>(bells_ + ranks_.size());
  transport_memory_ = reinterpret_cast<char*>(lateness_ + ranks_.size());
  buckets_ = reinterpret_cast<uint32_t*>(transport_memory_ + transport_bytes(local_size()));
  char* const log = reinterpret_cast<char*>(buckets_) + round_up(sizeof(uint32_t) * kBuckets);
  log_.emplace(header_->log_tail, log);
  entries_ = log + round_up(EventLog::bytes());
  const auto least = static_cast<uint32_t>(kShares * ranks_.size());
  if (capacity > 0) {
    // Memory for the first entries, so that operations can end with an error even if memory is short later.
    segment.commit(0, static_cast<size_t>(entries_ - base) + kEntriesStep * stride_);
    new (header_) Header{};
    header_->committed.store(kEntriesStep, std::memory_order_release);
    header_->capacity = static_cast<uint32_t>(std::min<size_t>(std::max<size_t>(capacity, least), kEntries));
    header_->lock.mutex.init();
    for (size_t r = 0; r < ranks_.size(); ++r) {
      new (&bells_[r]) PaddedBell{};
      new (&lateness_[r]) Lateness{};
    }
    std::fill_n(transport_memory_, transport_bytes(local_size()), '\0');
  }
  window_ = std::max(header_->capacity / least, 1u);
  most_ahead_ = (kShares - 2) * window_ - 1;  // even EntryQuota::agreed leaves window_ + 1 entries for EntryQuota::now
}

uint32_t* HostTable::bucket(const Key& key) { return &buckets_[key.low % kBuckets]; }

uint32_t HostTable::find(const Key& key) {
  uint32_t link = *bucket(key);
  while (link != kNone && !(entry(link - 1).key == key)) link = entry(link - 1).next;
  return link;
}

bool HostTable::may_make(EntryQuota due) const {
  return due == EntryQuota::now || bells_[local_rank_].ahead < most_ahead_ + (due == EntryQuota::agreed ? window_ : 0);
}

bool HostTable::take_entry(ArriveResult* arrival) {
  if (header_->free_head != kNone) {
    arrival->entry = header_->free_head - 1;
    header_->free_head = entry(arrival->entry).next;
    return true;
  }
  if (header_->used == header_->capacity) return false;
  arrival->needs_memory = header_->used == header_->committed.load(std::memory_order_acquire);
  if (arrival->needs_memory) return false;
  arrival->entry = header_->used++;
  return true;
}

// Commits memory for the next entries, so that a lack of memory raises no SIGBUS later; false if the memory is not
// available now. Called without the table's lock, since it may take a second. Several ranks may commit the same entries
// at once, which does no harm.
bool HostTable::commit_entries() {
  std::lock_guard<std::mutex> lock(lack_.mutex);
  const int64_t now = coarse_now_ns();
  if (!lack_.why.empty() && now - lack_.since < kCommitAgainNs) return false;
  uint32_t first = header_->committed.load(std::memory_order_acquire);
  const bool is_planted = testing::is_planted_each(testing::Fault::entries);
  const uint32_t more = std::min(kEntries - first, kEntriesStep);
  const auto begin = static_cast<size_t>(entries_ - segment_.base()) + first * stride_;
  try {
    if (is_planted) throw Error("a planted lack", ErrorCode::no_memory);
    segment_.commit(begin, more * stride_);
    lack_.why = {};
  } catch (const Error& error) {
    lack_.why = error.failure();
    lack_.since = now;
    return false;
  }
  header_->committed.compare_exchange_strong(first, first + more, std::memory_order_acq_rel);
  return true;
}

Failure HostTable::lack_of_memory() const {
  if (!lack_.met.load(std::memory_order_relaxed)) return {};
  std::lock_guard<std::mutex> lock(lack_.mutex);
  return lack_.why;
}

// Creates the entry of an operation at which this rank arrives first. False: it could not, for the reason in `arrival`.
bool HostTable::make_entry(const Arriving& arriving, uint64_t hash, ArriveResult* arrival, Rings& rings) {
  if (departed_rank() >= 0) {
    arrival->departed = true;
    return false;
  }
  const bool has_entry = may_make(arriving.due) && take_entry(arrival);
  lack_.met.store(arrival->needs_memory, std::memory_order_relaxed);
  if (!has_entry) {
    arrival->table_full = true;
    return false;
  }
  Entry& e = entry(arrival->entry);
  e.key = arriving.key;
  ++e.generation;
  e.next = *bucket(arriving.key);
  *bucket(arriving.key) = arrival->entry + 1;
  e.state = State::gathering;
  e.arrived = 0;
  e.left.store(0, std::memory_order_relaxed);
  e.signatures = {hash, false};
  e.sequence = 0;
  e.placement = 0;
  e.operation = arriving.operation;
  e.next_chunk.store(0, std::memory_order_relaxed);
  e.finished_pieces.store(0, std::memory_order_relaxed);
  e.claimed.store(kNotStopped, std::memory_order_relaxed);
  e.pieces_to_finish = arriving.pieces_to_finish;
  e.owner = arriving.owner;
  e.first = arriving.first;
  e.arrivals.first = arriving.came;
  e.arrivals.later = 0;
  e.arrivals.ends_step = arriving.ends_step;
  e.ahead_of = arriving.due == EntryQuota::now ? kNobody : local_rank_;
  bells_[local_rank_].ahead += arriving.due != EntryQuota::now;
  set_text(e.name, kNameBytes, *arriving.name);
  e.error.clear();
  if (header_->subscribers > 0) {
    append(TableEvent::Type::made, arrival->entry);
    rings.subscribers = true;
  }
  return true;
}

ArriveResult HostTable::arrive_locked(const Arriving& arriving, uint64_t hash, Rings& rings) {
  ArriveResult arrival;
  const uint32_t link = find(arriving.key);
  if (link != kNone) {
    arrival.entry = link - 1;
    if (entry(arrival.entry).has_arrived(static_cast<size_t>(local_rank_))) {
      arrival.table_full = true;
      return arrival;
    }
  } else if (!make_entry(arriving, hash, &arrival, rings)) {
    return arrival;
  }
  Entry& e = entry(arrival.entry);
  RankRecord& mine = e.records()[local_rank_];
  mine.refused = arriving.refusal != nullptr;
  mine.slot = arriving.slot;
  mine.placement = arriving.placement;
  mine.launch = 0;
  mine.stamps.clear();
  if (stamping()) mine.stamps.set(Stamp::arrived);
  mine.signature_hash = hash;
  e.signatures.disagree = e.signatures.disagree || mine.refused || hash != e.signatures.first;
  mine.long_text = arriving.long_text;
  set_text(mine.text, kTextBytes, arriving.refusal != nullptr ? *arriving.refusal : *arriving.signature);
  mine.arrived_in.store(e.generation, std::memory_order_release);
  ++e.arrived;
  e.arrivals.later += arriving.came - e.arrivals.first;
  e.arrivals.complete = arriving.came;
  e.arrivals.last = local_rank_;
  arrival.generation = e.generation;
  arrival.failed = e.state == State::done;
  arrival.last = !arrival.failed && e.arrived == ranks_.size();
  arrival.waits = arrival.last;
  return arrival;
}

bool HostTable::lock_comes_free() { return lock_.comes_free(kProbeUs); }

void HostTable::subscribe_to_new_entries(bool on) {
  lock_.run([&] {
    if (bells_[local_rank_].subscribed.exchange(on) != on) header_->subscribers += on ? 1 : -1;
  });
}

std::optional<Key> HostTable::first_key_of(const TableEvent& event) {
  return lock_.run([&]() -> std::optional<Key> {
    Entry& e = entry(event.entry);
    if (e.generation != event.generation || e.has_arrived(static_cast<size_t>(local_rank_))) return std::nullopt;
    return e.first;
  });
}

std::string HostTable::text_of(const RankRecord& record) const {
  if (record.long_text.bytes == 0) return record.text;
  return std::string(segment_.base() + record.long_text.at, record.long_text.bytes);
}

// Why the ranks of this host that have arrived cannot run the operation together; empty: they can.
Failure HostTable::disagreement(Entry& e) const {
  if (!e.signatures.disagree) return {};
  const RankRecord* records = e.records();
  std::optional<int> first;
  for (int r = 0; r < local_size(); ++r) {
    if (!e.has_arrived(static_cast<size_t>(r))) continue;
    if (!first) first = r;
    if (records[r].refused) {
      return {shown_name(e.name) + " was refused by rank " + std::to_string(ranks_[r]) + ": " + text_of(records[r]),
              ErrorCode::refused,
              {ranks_[r]}};
    }
  }
  for (int r = first.value_or(local_size()) + 1; r < local_size(); ++r) {
    if (e.has_arrived(static_cast<size_t>(r)) && records[r].signature_hash != records[*first].signature_hash) {
      return {difference(e.name, ranks_[*first], text_of(records[*first]), ranks_[r], text_of(records[r])),
              ErrorCode::mismatch,
              {ranks_[*first], ranks_[r]}};
    }
  }
  return {};
}

// Why an operation that waits for ranks or hosts must fail, even if all ranks arrive; empty: no such reason is known.
// Ranks report it instead of a rank's departure, which is often only its consequence.
Failure HostTable::known_error(Entry& e) const {
  if (e.state == State::gathering) return disagreement(e);
  return e.state == State::announced ? e.error.get() : Failure();
}

// Counts the first part of an operation only: ranks post its later parts after they have waited for each other at the
// first.
void HostTable::note_complete(Entry& e) {
  if (ranks_.size() == 1 || !(e.key == e.first)) return;
  const auto others = static_cast<int64_t>(ranks_.size() - 1);
  lateness_[local_rank_].add(waited_for_last(e) / others, e.arrivals.ends_step);
}

int64_t HostTable::waited_for_last(const Entry& e) const {
  // A rank reads the clock before it takes the lock. So the rank with the earliest time may be the last to get the
  // lock, and the difference may be negative.
  return std::max<int64_t>(
      static_cast<int64_t>(ranks_.size()) * (e.arrivals.complete - e.arrivals.first) - e.arrivals.later, 0);
}

std::vector<LateRank> HostTable::late_ranks() const {
  std::vector<LateRank> late;
  for (size_t r = 0; r < ranks_.size(); ++r) late.emplace_back(ranks_[r], lateness_[r]);
  return late;
}

void HostTable::complete_set(ArriveResult& arrival, const Arriving& arriving, size_t inline_limit, Rings& rings) {
  Entry& e = entry(arrival.entry);
  const Failure error = disagreement(e);
  const bool tries_again = std::exchange(arrival.waits, false);
  const bool is_inline = e.operation.bytes() <= inline_limit;  // including an operation without bytes
  if (!several_hosts_ && error.empty() && !is_inline) {
    const Readiness readiness = ask_hook(arrival.entry, tries_again, rings);
    arrival.waits = readiness == Readiness::waits;
    arrival.last = readiness == Readiness::ready;
    arrival.failed = readiness == Readiness::failed;
    if (readiness != Readiness::ready) return;
  }
  if (error.empty()) note_complete(e);
  if (several_hosts_) {
    // The other hosts must learn of an error too: the first rank of this host announces the operation with the error's
    // text.
    e.state = State::announced;
    e.error.set(error);
    arrival.last = false;
    append(TableEvent::Type::announced, arrival.entry);
    rings.one = 0;
    return;
  }
  if (!error.empty()) {
    end_locked(arrival.entry, error, rings);
    arrival.failed = true;
    arrival.last = false;
    return;
  }
  if (is_inline) {
    e.state = State::taken;
    e.next_chunk.store(e.pieces_to_finish, std::memory_order_relaxed);
    return;
  }
  arrival.last = false;
  e.state = State::ready;
  append(TableEvent::Type::ready, arrival.entry);
  wake_workers(e, arriving.first_of_several, rings);
}

// The local ranks that are to work on the chunks of an operation without an owner. For an operation in place, there are
// no more of them than cores, but at least two, since one rank may have something large to do first. If the host has
// more ranks than cores, only the memory decides which ranks they are: a process's first access to each page of a slot
// costs more than the work on the page, and page tables take memory.
RankRange HostTable::workers(const Entry& e) const {
  if (!e.operation.in_place || e.operation.kind != Kind::allreduce) return {0, local_size()};
  const auto size = static_cast<uint32_t>(local_size());
  const uint32_t count = std::min(std::max(std::min(e.pieces_to_finish, cores_), 2U), size);
  if (size <= cores_) return {local_rank_, static_cast<int>(count)};
  const uint64_t first = e.records()[0].slot;
  return {static_cast<int>(hash_bytes(&first, sizeof first, 0) % size), static_cast<int>(count)};
}

bool HostTable::works_on(uint32_t index) {
  const auto size = static_cast<uint32_t>(local_size());
  return size <= cores_ || workers(entry(index)).contains(local_rank_, local_size());
}

// Chooses the ranks to wake for an operation that has become ready on one host; the other ranks wake when it is done.
// All ranks are woken for a broadcast, since each rank copies the result itself, and after the first of several parts,
// since each rank may now bring its next part.
void HostTable::wake_workers(const Entry& e, bool first_of_several, Rings& rings) const {
  if (e.owner == kAnybody) {
    rings.some = workers(e);
  } else if (!first_of_several) {
    rings.one = e.owner;
  } else {
    rings.all();
  }
}

// Waits until the hook does not wait, and then completes the set of ranks. It releases the table's lock between its
// attempts, so that other operations can use the table.
ArriveResult HostTable::complete_later(ArriveResult arrival, const Arriving& arriving, size_t inline_limit) {
  for (const int64_t begun = now_ns(); arrival.waits;) {
    usleep(kHookPauseUs);
    beat();
    arrival.waits = now_ns() - begun < kHookPatienceNs;
    change([&](Rings& rings) {
      Entry& e = entry(arrival.entry);
      if (e.generation == arrival.generation && e.state == State::gathering) {
        complete_set(arrival, arriving, inline_limit, rings);
      } else {  // the operation was ended meanwhile
        arrival.waits = arrival.last = false;
        arrival.failed = true;
      }
    });
  }
  return arrival;
}

HostTable::Readiness HostTable::ask_hook(uint32_t index, bool tries_again, Rings& rings) {
  Entry& e = entry(index);
  ReadyHook* const hook = hook_of(e.operation);
  if (hook == nullptr) return Readiness::ready;
  try {
    if (!several_hosts_) e.placement = hook->placement(e);
    return hook->make_ready(e, tries_again) ? Readiness::ready : Readiness::waits;
  } catch (const Error& error) {
    end_locked(index, shown_name(e.name) + ": " + error.failure(), rings);
    return Readiness::failed;
  }
}

bool HostTable::agree(Key key, uint64_t sequence, const Failure& error, uint64_t placement, bool alone) {
  for (const int64_t begun = now_ns();;) {
    const bool tries_again = now_ns() - begun < kHookPatienceNs;
    const std::optional<bool> agreed = try_agree(key, sequence, error, placement, alone, tries_again);
    if (agreed) return *agreed;
    usleep(kHookPauseUs);
    beat();
  }
}

// nullopt if a hook waits for another rank, and `tries_again`.
std::optional<bool> HostTable::try_agree(Key key, uint64_t sequence, const Failure& error, uint64_t placement,
                                         bool alone, bool tries_again) {
  return change([&](Rings& rings) -> std::optional<bool> {
    const uint32_t link = find(key);
    if (link == kNone || entry(link - 1).state != State::announced) return !error.empty();
    Entry& e = entry(link - 1);
    if (!error.empty()) {
      end_locked(link - 1, error, rings);
      return true;
    }
    e.sequence = sequence;
    e.placement = placement;
    e.arrivals.complete = now_ns();
    const Readiness readiness = ask_hook(link - 1, tries_again, rings);
    if (readiness != Readiness::ready) return readiness == Readiness::waits ? std::optional<bool>() : true;
    e.state = State::ready;
    append(TableEvent::Type::ready, link - 1);
    rings.others = !alone;
    return true;
  });
}

void HostTable::finish_pieces(uint32_t index, uint32_t pieces) {
  Entry& e = entry(index);
  if (e.finished_pieces.fetch_add(pieces, std::memory_order_acq_rel) + pieces < e.pieces_to_finish) return;
  change([&](Rings& rings) {
    if (e.state == State::ready || e.state == State::taken) end_locked(index, {}, rings);
  });
}

void HostTable::stop_chunks(uint32_t index) {
  Entry& e = entry(index);
  const uint32_t claimed = e.next_chunk.fetch_or(kStopped, std::memory_order_acq_rel);
  if ((claimed & kStopped) == 0) e.claimed.store(std::min(claimed, e.pieces_to_finish), std::memory_order_release);
}

bool HostTable::chunks_ended(uint32_t index) {
  Entry& e = entry(index);
  const uint32_t done = e.finished_pieces.load(std::memory_order_acquire);
  const uint32_t claimed = e.claimed.load(std::memory_order_acquire);
  return done >= e.pieces_to_finish || (claimed != kNotStopped && done >= claimed);
}

bool HostTable::claim_chunk(uint32_t index) {
  return (entry(index).next_chunk.fetch_add(1, std::memory_order_acq_rel) & kStopped) == 0;
}

void HostTable::drop_chunk(uint32_t index) { entry(index).finished_pieces.fetch_add(1, std::memory_order_acq_rel); }

void HostTable::finish_refused(uint32_t index, const Failure& error) {
  change([&](Rings& rings) {
    Entry& e = entry(index);
    const bool last = e.finished_pieces.fetch_add(1, std::memory_order_acq_rel) + 1 == e.pieces_to_finish;
    if (last && e.state == State::ready) end_locked(index, error, rings);
  });
}

void HostTable::end_locked(uint32_t index, const Failure& error, Rings& rings) {
  Entry& e = entry(index);
  e.state = State::done;
  if (!error.empty()) stop_chunks(index);
  e.error.set(error);
  append(TableEvent::Type::done, index);
  rings.others = true;
}

void HostTable::leave(uint32_t index) {
  const bool last = entry(index).left.fetch_add(1, std::memory_order_acq_rel) + 1 == ranks_.size();
  if (last) {
    lock_.run([&] { free_locked(index); });
  } else {
    lock_.require_good();
  }
}

// Every rank has left the entry: see Note [who may touch an entry when].
void HostTable::free_locked(uint32_t index) {
  Entry& e = entry(index);
  if (e.ahead_of != kNobody) --bells_[e.ahead_of].ahead;
  uint32_t* link = bucket(e.key);
  while (*link != index + 1) link = &entry(*link - 1).next;
  *link = e.next;
  e.next = header_->free_head;
  header_->free_head = index + 1;
}

void HostTable::fail(uint32_t index, const Failure& error) {
  change([&](Rings& rings) {
    Entry& e = entry(index);
    if (e.state == State::done) return;
    const Failure known = error.code == ErrorCode::dead ? Failure() : known_error(e);
    end_locked(index, known.empty() ? error : known, rings);
  });
}

void HostTable::depart(int rank, const Failure& reason, bool fails) {
  end_waiting(Departed(rank, reason), !several_hosts_, fails);
}

void HostTable::close(int rank, const Failure& reason) { end_waiting(Departed(rank, reason), true, false); }

void HostTable::end_waiting(const Departed& gone, bool announced_too, bool fails) {
  change([&](Rings& rings) {
    if (departed_rank() < 0 || fails) {
      header_->departure.set(gone.reason);
      header_->departed_rank.store(gone.rank + 1, std::memory_order_release);
    }
    // Operations that all ranks agreed on run to their end. Operations that still wait for ranks or hosts cannot
    // complete.
    for (uint32_t b = 0; b < kBuckets; ++b) {
      for (uint32_t link = buckets_[b]; link != kNone; link = entry(link - 1).next) {
        Entry& e = entry(link - 1);
        if (e.state == State::gathering || (announced_too && e.state == State::announced)) {
          // All ranks restart after a death. They recognize it by the error's code, so no other error may replace it.
          const Failure known = gone.failure().code == ErrorCode::dead ? Failure() : known_error(e);
          end_locked(link - 1, known.empty() ? shown_name(e.name) + ": " + gone.failure() : known, rings);
        }
      }
    }
    rings.all();
  });
}

Departed HostTable::departed() const {
  return lock_.run([&] { return Departed(departed_rank(), header_->departure.get()); });
}

State HostTable::state(uint32_t index) {
  return lock_.run([&] { return entry(index).state; });
}

std::optional<Failure> HostTable::announced_error(uint32_t index) {
  return lock_.run([&]() -> std::optional<Failure> {
    const Entry& e = entry(index);
    if (e.state != State::announced) return std::nullopt;
    return e.error.get();
  });
}

OperationState HostTable::operation_state(const Key& key) {
  return lock_.look(kLookUs, [&] {
    OperationState operation_state;
    const uint32_t link = find(key);
    if (link == kNone) return operation_state;
    Entry& e = entry(link - 1);
    operation_state.found = true;
    operation_state.state = e.state;
    operation_state.waiting = e.state != State::done && e.has_arrived(static_cast<size_t>(local_rank_));
    for (int r = 0; r < local_size(); ++r) {
      if (!e.has_arrived(static_cast<size_t>(r))) {
        operation_state.missing.push_back(r);
      } else if (e.records()[r].refused || e.state == State::done) {
        operation_state.through.push_back(r);
      }
    }
    return operation_state;
  });
}

bool HostTable::can_arrive(const Key& key, EntryQuota due) {
  const bool short_of_memory = [&] {
    std::lock_guard<std::mutex> lock(lack_.mutex);
    return !lack_.why.empty() && coarse_now_ns() - lack_.since < kCommitAgainNs;
  }();
  return lock_.run([&] {
    const uint32_t link = find(key);
    if (link != kNone) return !entry(link - 1).has_arrived(static_cast<size_t>(local_rank_));
    if (departed_rank() >= 0) return true;
    const bool has_memory =
        header_->free_head != kNone || header_->used < header_->committed.load(std::memory_order_acquire);
    const bool is_short = may_make(due) && !has_memory && header_->used < header_->capacity;
    lack_.met.store(is_short, std::memory_order_relaxed);
    return is_short ? !short_of_memory : has_memory && may_make(due);
  });
}

std::vector<int> HostTable::behind() {
  return lock_.look(kLookUs, [&] {
    std::vector<bool> is_behind(ranks_.size());
    for (uint32_t index = 0; index < header_->used; ++index) {
      Entry& e = entry(index);
      if (e.left.load(std::memory_order_relaxed) == ranks_.size()) continue;  // a free entry
      for (size_t r = 0; r < ranks_.size(); ++r) is_behind[r] = is_behind[r] || !e.has_arrived(r);
    }
    std::vector<int> behind;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      if (is_behind[r] && static_cast<int>(r) != local_rank_) behind.push_back(static_cast<int>(r));
    }
    if (behind.empty() && is_behind[static_cast<size_t>(local_rank_)]) behind.push_back(local_rank_);
    return behind;
  });
}

bool HostTable::try_give_up(const Key& key, const Failure& reason) {
  return give_up_within(kLookUs, key, reason, false);
}

bool HostTable::give_up_within(int64_t limit_us, const Key& key, const Failure& reason, bool announced) {
  return change(
      [&](Rings& rings) {
        const uint32_t link = find(key);
        if (link == kNone || entry(link - 1).state != (announced ? State::announced : State::gathering)) return false;
        end_locked(link - 1, shown_name(entry(link - 1).name) + ": " + reason, rings);
        rings.here = true;
        return true;
      },
      limit_us);
}

void HostTable::beat() {
  std::atomic<int64_t>& beat = bells_[local_rank_].beat;
  const int64_t now = coarse_now_ns();
  if (now - beat.load(std::memory_order_relaxed) > kBeatNs) beat.store(now, std::memory_order_relaxed);
}

void HostTable::look_after_lock() {
  lock_.require_good();
  const int64_t now = coarse_now_ns();
  if (now - looked_ < kLookNs) return;
  looked_ = now;
  lock_.notice_death();
}

std::vector<int> HostTable::unresponsive() const {
  const int64_t now = coarse_now_ns();
  std::vector<int> ranks;
  for (int r = 0; r < local_size(); ++r) {
    if (now - bells_[r].beat.load(std::memory_order_relaxed) > kSilenceNs) ranks.push_back(r);
  }
  return ranks;
}

void HostTable::append(TableEvent::Type type, uint32_t index) { log_->append({type, index, entry(index).generation}); }

void HostTable::ring(const Rings& rings) {
  const int size = local_size();
  const bool any = rings.others || rings.subscribers || rings.here || rings.one != kNobody || rings.some.count > 0;
  if (any && testing::is_planted(testing::Fault::ring)) usleep(kRingsLateUs);
  if (rings.here) bells_[local_rank_].ring();
  if (rings.one != kNobody) bells_[rings.one].ring();
  if (rings.others || rings.subscribers) {
    for (int r = 0; r < size; ++r) {
      if (r != local_rank_ && (rings.others || bells_[r].subscribed.load(std::memory_order_relaxed))) bells_[r].ring();
    }
  }
  for (int k = 0; k < rings.some.count; ++k) bells_[(rings.some.first + k) % size].ring();
}

}  // namespace mykv
