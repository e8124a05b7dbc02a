// The table in the shared segment: which rank of the host has arrived at which operation, with which memory; and a log
// of entries that became ready or done. No rank waits here for the arrival of another. The rank that arrives last, or
// finishes the last chunk, writes the log and rings the bells of the ranks that have something to do.
//
// See Note [who may touch an entry when] in entry.h.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "memory/segment.h"
#include "operations/operation.h"
#include "table/bell.h"
#include "table/entry.h"
#include "table/event_log.h"
#include "table/table_lock.h"

namespace mykv {

namespace testing {
struct RuntimeAccess;
}

// The state of an operation on one host.
struct OperationState {
  bool found = false;    // some rank of this host has arrived, and not all ranks have left
  bool waiting = false;  // this rank has arrived, and there is no result
  State state = State::gathering;
  std::vector<int> missing;  // local ranks that have not arrived
  std::vector<int> through;  // local ranks that arrived and do not wait: they refused, or the operation has ended
};

// Which entries of the table a part may take. HostTable::window() says which operations are due.
enum class EntryQuota : uint8_t {
  now,     // for an operation that is due: any free entry
  agreed,  // for a later part, at which all ranks will arrive: as for `ahead`, and a few reserved entries
  ahead,   // for an operation that is not due: most of this rank's share of the table
};

struct ArriveResult {
  uint32_t entry = 0;
  uint32_t generation = 0;
  // The table or this rank's share is full, or this rank has not left an older entry of this key: try later.
  bool table_full = false;
  bool needs_memory = false;  // table_full until memory is committed for more entries
  bool waits = false;         // this rank arrived last, but a ReadyHook waits for another rank
  bool departed = false;      // a needed rank has left: no entry was created
  bool last = false;          // this rank arrived last, and must do all the work; never with several hosts
  bool failed = false;        // the entry is done already, with an error
};

// `count` local ranks, beginning with `first` and continuing with rank 0 after the host's last rank.
struct RankRange {
  int first = 0;
  int count = 0;
  bool contains(int rank, int size) const { return (rank - first + size) % size < count; }
};

// Runs under the lock of the table when an operation becomes ready. A transport implements it.
class ReadyHook {
 public:
  virtual ~ReadyHook() = default;
  virtual bool concerns(const Operation& operation) const = 0;
  // Digest of RankRecord::placement of this host's ranks.
  virtual uint64_t placement(Entry& entry) const = 0;
  // Called before State::ready. False: it waits for another rank; only if `tries_again`, since the caller will. Throws
  // Error: then the operation ends with the error.
  virtual bool make_ready(Entry& entry, bool tries_again) = 0;
};

class HostTable {
 public:
  // Bytes of shared memory that the table takes, in whole pages (most of them never touched).
  static size_t bytes(int local_size);
  // `ranks`: the labels of this host's ranks. `capacity`: the first rank of the host creates the table with this number
  // of entries, clamped to the possible range; all other ranks pass 0. Throws Error if there is no memory for the
  // table.
  HostTable(const Segment& segment, std::vector<int> ranks, int local_rank, size_t capacity, bool several_hosts);

  struct Arriving {
    Key key;
    const std::string* name;
    const std::string* signature;
    const std::string* refusal;  // null: none
    LongText long_text;          // the refusal or the signature, if it is longer than kTextBytes - 1
    Operation operation;
    uint64_t slot;
    uint32_t pieces_to_finish;
    int32_t owner;
    uint64_t placement = 0;
    Key first = {};  // key of the operation's first part
    // Limits the entries that this rank may create; it can always join an entry that another rank has created.
    EntryQuota due = EntryQuota::now;
    int64_t came = 0;  // this rank's arrival; now_ns()
    bool ends_step = false;
    bool awaited = false;           // see Request::awaited
    bool first_of_several = false;  // the first part of an operation that has more
    bool posting = false;           // a user's thread, which waits only briefly for a rank that holds the lock
  };
  // The number of a rank's operations that are due: its oldest ones, in the order of its calls. The table reserves
  // entries for them. So the oldest operation always finds an entry if all ranks make their calls in the same order.
  // Otherwise the oldest operation finds an entry if it is due on some rank of each host.
  uint64_t window() const { return window_; }
  // Records this rank's arrival. `inline_limit`: an operation of at most this size in bytes is not put into the log
  // when it becomes ready: the rank that arrived last (ArriveResult::last) must do all the work and call
  // finish_pieces(). `claim` is called under the table's lock, before other ranks can see the arrival; the entry and
  // its generation are known then.
  template <class Claim>
  ArriveResult arrive(const Arriving& arriving, size_t inline_limit, Claim&& claim) {
    const uint64_t hash = hash_bytes(arriving.signature->data(), arriving.signature->size(), 0);
    for (;;) {
      const ArriveResult arrival = change(
          [&](Rings& rings) {
            ArriveResult made = arrive_locked(arriving, hash, rings);
            if (made.table_full || made.departed) return made;
            claim(made);
            if (made.last) complete_set(made, arriving, inline_limit, rings);
            if (arriving.awaited && rings.one == local_rank_) rings.one = kNobody;
            return made;
          },
          arriving.posting ? kProbeUs : 0);
      if (arrival.waits) return complete_later(arrival, arriving, inline_limit);
      if (!arrival.needs_memory || !commit_entries()) return arrival;
    }
  }

  Entry& entry(uint32_t index) { return *reinterpret_cast<Entry*>(entries_ + size_t{index} * stride_); }

  // The other hosts agreed that the operation may run, in place `sequence` of their order, or found `error`.
  // `placement` is for hooks. `alone`: this rank runs the operation for its host. Returns false if the hosts agreed
  // without an error, but this host has ended the operation meanwhile, since a rank has left.
  bool agree(Key key, uint64_t sequence, const Failure& error, uint64_t placement, bool alone);
  // `pieces` more pieces of the operation are finished; the last piece makes it done.
  void finish_pieces(uint32_t index, uint32_t pieces);
  // Whether this rank works on the chunks of an operation that is ready and has no owner.
  bool works_on(uint32_t index);
  // Claims the chunk of this rank's slice before work on it begins. False: the operation was stopped.
  bool claim_chunk(uint32_t index);
  // This rank will not finish a chunk that it claimed, and has stopped using memory of the operation. Takes no lock.
  void drop_chunk(uint32_t index);
  // Keeps all ranks from beginning another chunk. Takes no lock. Called whenever an operation ends with an error. Until
  // chunks_ended() is true, other ranks may still write chunks that they have begun, even into the memory of ranks that
  // have left.
  void stop_chunks(uint32_t index);
  bool chunks_ended(uint32_t index);
  // Finishes this rank's only chunk of an operation that fails. Each rank finds the error itself and calls this.
  void finish_refused(uint32_t index, const Failure& error);
  // This rank has stopped using the entry. Only the rank that leaves last takes the lock, to free the entry.
  void leave(uint32_t index);
  // Ends an operation with an error on all ranks of the host.
  void fail(uint32_t index, const Failure& error);
  // `rank` leaves: operations of this host that wait for ranks, and all later operations, fail with `reason`. An
  // operation announced to other hosts may have been agreed on already; it ends with their verdict, or with close().
  // `fails`: the rank has broken down; departed() then names it even if another rank left before it.
  void depart(int rank, const Failure& reason, bool fails = false);
  // All hosts know that `rank` has left: no further operation is agreed on.
  void close(int rank, const Failure& reason);
  // The rank that left first, or the last rank that broke down; -1: none.
  int departed_rank() const { return header_->departed_rank.load(std::memory_order_acquire) - 1; }
  Departed departed() const;  // departed_rank() and the reason
  State state(uint32_t index);
  // Why an operation in State::announced has failed (empty: it has not); nullopt: the operation is in another state.
  std::optional<Failure> announced_error(uint32_t index);
  // The signature of a rank that has arrived, or why it has refused.
  std::string text_of(const RankRecord& record) const;

  // For the stall watch, which must not block. Throws TableLocked when a rank keeps the table locked for a second: the
  // rank was stopped in the middle of a change.
  OperationState operation_state(const Key& key);
  // Whether this rank could arrive at the operation now: the operation is in the table, or the table has room.
  bool can_arrive(const Key& key, EntryQuota due);
  // Why there is no memory for the entry that this rank wanted last; empty: the rank did not need more memory.
  Failure lack_of_memory() const;
  // Whether this rank wants events about entries that other ranks create. It wants them while it finds no free entry
  // for its operations.
  void subscribe_to_new_entries(bool on);
  // The key of the first part of the event's operation; empty if this rank has arrived at the entry already, or the
  // entry is used for another operation.
  std::optional<Key> first_key_of(const TableEvent& event);
  // The other local ranks that have yet to arrive at one or more operations in the table. If there are none: this rank,
  // if it has yet to arrive at one.
  std::vector<int> behind();
  // Ends an operation that some rank of this host has not arrived at; the rank gets the error when it arrives. With
  // `announced`: ends an operation that is announced to the other hosts. False if there is no such operation.
  bool give_up(const Key& key, const Failure& reason, bool announced) {
    return give_up_within(0, key, reason, announced);
  }
  // The same for the stall watch, which must not block. Throws TableLocked when a rank keeps the table locked for a
  // second.
  bool try_give_up(const Key& key, const Failure& reason);
  // Methods that read or change entries wait for this lock, unless noted, and throw Error after a verdict on the table.
  TableLock& lock() { return lock_; }
  const TableLock& lock() const { return lock_; }
  // Throws if there was a verdict on the table, and checks once a second whether the lock's holder has died.
  void look_after_lock();
  // False if a rank keeps the lock: a user's thread must not wait for it without limit.
  bool lock_comes_free();
  // Heartbeat of this rank's thread.
  void beat();
  // For an entry at which all ranks have arrived: the sum of the times that this host's ranks waited for the last rank.
  int64_t waited_for_last(const Entry& entry) const;
  // How late each rank of this host was. Needs no lock.
  std::vector<LateRank> late_ranks() const;
  // Local ranks without a heartbeat for some seconds.
  std::vector<int> unresponsive() const;

  // The next event that this rank has not seen.
  // `overrun` is set when the log was overwritten before this rank read it: look at all entries of this rank instead.
  bool next_event(TableEvent* event, bool* overrun) { return log_->next(event, overrun); }

  // The hook must live as long as operations that it concerns.
  void set_hook(ReadyHook& hook) { hook_ = &hook; }
  // The hook that concerns the operation, or null.
  ReadyHook* hook_of(const Operation& operation) const {
    return hook_ != nullptr && hook_->concerns(operation) ? hook_ : nullptr;
  }
  // Shared memory of a transport for all ranks of this host, zeroed at first.
  void* transport_memory() const { return transport_memory_; }
  static constexpr size_t kTransportBytes = 128;  // and a number for each rank
  static size_t transport_bytes(int local_size) {
    return (kTransportBytes + sizeof(uint64_t) * static_cast<size_t>(local_size) + 63) / 64 * 64;
  }

  Bell& bell(int local_rank) { return bells_[local_rank]; }
  // The number of timelines of this host's ranks that want stamps.
  std::atomic<uint32_t>& stamp_flag() { return header_->timelines; }
  bool stamping() const { return header_->timelines.load(std::memory_order_relaxed) != 0; }
  Stamps& my_stamps(Entry& entry) const { return entry.records()[local_rank_].stamps; }
  int local_size() const { return static_cast<int>(ranks_.size()); }
  int local_rank() const { return local_rank_; }
  const std::vector<int>& ranks() const { return ranks_; }

 private:
  friend struct testing::RuntimeAccess;
  struct alignas(64) PaddedBell : Bell {
    std::atomic<int64_t> beat{0};  // when the rank's thread was last seen
    // Changed under the table's lock only:
    uint32_t ahead = 0;  // entries that the rank has made before they were due
    std::atomic<bool> subscribed{false};
  };
  struct alignas(64) Header {
    TableLock::Shared lock;
    uint32_t capacity;
    uint32_t used;                    // entries ever used
    std::atomic<uint32_t> committed;  // entries for which memory is committed
    uint32_t free_head;               // first entry of the list of free entries
    uint32_t subscribers;
    std::atomic<int> departed_rank;  // the rank that has left, plus one; 0: none
    SharedFailure departure;         // why that rank has left
    alignas(64) std::atomic<uint64_t> log_tail;
    TableLock::Verdict verdict;
    alignas(64) std::atomic<uint32_t> timelines;  // on a cache line of its own, since every rank reads it often
  };
  // The bells to ring after a change of the table. They ring after the lock is released, since a thread that wakes
  // takes the lock. If this process dies or stops before it rings, the ranks that sleep see the change when their sleep
  // ends, within a second.
  struct Rings {
    void all() { others = here = true; }

    bool others = false;       // the other ranks of this host ...
    bool subscribers = false;  // ... or only the subscribers among them
    bool here = false;         // this rank
    int one = kNobody;         // this local rank
    RankRange some;            // these local ranks
  };
  static constexpr int64_t kProbeUs = 50000;  // longest wait of a user's thread for the table's lock
  // Calls run(rings) under the lock and returns its result. Rings the bells even if it throws. Throws TableLocked if a
  // rank keeps the lock for `limit_us`; 0: waits without limit.
  template <class Run>
  auto change(Run&& run, int64_t limit_us = 0) {
    struct Ringer {
      ~Ringer() { table.ring(rings); }
      HostTable& table;
      Rings rings;
    } ringer{*this, {}};
    return lock_.run([&] { return run(ringer.rings); }, limit_us);
  }
  void ring(const Rings& rings);
  ArriveResult arrive_locked(const Arriving& arriving, uint64_t hash, Rings& rings);
  void note_complete(Entry& entry);
  void complete_set(ArriveResult& arrival, const Arriving& arriving, size_t inline_limit, Rings& rings);
  uint32_t* bucket(const Key& key);
  uint32_t find(const Key& key);
  bool may_make(EntryQuota due) const;
  bool take_entry(ArriveResult* arrival);
  bool make_entry(const Arriving& arriving, uint64_t hash, ArriveResult* arrival, Rings& rings);
  bool commit_entries();
  ArriveResult complete_later(ArriveResult arrival, const Arriving& arriving, size_t inline_limit);
  void end_locked(uint32_t index, const Failure& error, Rings& rings);
  void free_locked(uint32_t index);
  Failure disagreement(Entry& entry) const;
  Failure known_error(Entry& entry) const;
  void end_waiting(const Departed& gone, bool announced_too, bool fails);
  enum class Readiness { ready, waits, failed };
  Readiness ask_hook(uint32_t index, bool tries_again, Rings& rings);
  RankRange workers(const Entry& entry) const;
  void wake_workers(const Entry& entry, bool first_of_several, Rings& rings) const;
  bool give_up_within(int64_t limit_us, const Key& key, const Failure& reason, bool announced);
  std::optional<bool> try_agree(Key key, uint64_t sequence, const Failure& error, uint64_t placement, bool alone,
                                bool tries_again);
  void append(TableEvent::Type type, uint32_t index);

  const Segment& segment_;
  std::vector<int> ranks_;
  int local_rank_;
  bool several_hosts_;
  const uint32_t cores_;
  size_t stride_;
  uint32_t window_;
  uint32_t most_ahead_;
  Header* header_;
  PaddedBell* bells_;
  Lateness* lateness_;
  char* transport_memory_;
  ReadyHook* hook_ = nullptr;
  uint32_t* buckets_;
  char* entries_;
  std::optional<EventLog> log_;
  int64_t looked_ = 0;  // when look_after_lock() last checked the lock
  struct {
    mutable std::mutex mutex;
    Failure why;                   // empty: memory is not short
    int64_t since = 0;             // when memory was last lacking; coarse_now_ns()
    std::atomic<bool> met{false};  // the last entry that this rank wanted needs more memory
  } lack_;
  mutable TableLock lock_;
};

}  // namespace mykv
