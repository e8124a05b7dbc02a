// Where the ranks of a host meet: a table in the shared segment that says which rank has arrived at which operation
// with what, and a log of what became ready and what is done. Nobody waits in here; whoever arrives last, or finishes
// the last piece, writes the log and rings the others.
//
// An entry lives from its first arrival until every rank of the host has left it. A rank that has arrived may read
// the entry until it leaves; what is written after the entry became ready is only its counters.
#pragma once

#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "memory/segment.h"
#include "table/bell.h"
#include "table/departed.h"
#include "table/entry.h"
#include "table/event_log.h"
#include "table/launch_order.h"
#include "table/table_lock.h"

namespace mykv {

// Where an operation stands on one host.
struct OperationState {
  bool found = false;    // some rank of this host has arrived, and not all have left
  bool waiting = false;  // this rank has arrived, and there is no result
  State state = State::gathering;
  std::vector<int> missing;  // local ranks that have not arrived
  std::vector<int> through;  // local ranks that have, but do not wait: they have refused, or it has ended
};

// Of an operation among all that a rank has been asked for.
enum class Due : uint8_t {
  now,     // it may take any place of the table that is free
  agreed,  // not its first part: all ranks will bring it; a few places are kept for these
  ahead,   // it may take most of this rank's part of the table
};

struct ArriveResult {
  uint32_t entry = 0;
  uint32_t generation = 0;
  bool table_full = false;    // or this rank's part of it, or it has not left the last operation of this key: try later
  bool needs_memory = false;  // as table_full, until there is memory for more entries
  bool departed = false;      // a rank that is needed has left: there is no entry
  bool last = false;          // this rank completed the host's set
  bool failed = false;        // done already, with an error
};

class HostTable {
 public:
  // Bytes of shared memory that the table takes, whole pages (most of them never touched).
  static size_t bytes(int local_size);
  // `ranks`: what messages call each rank of this host. `places`: 0, but for the first rank of the host, which makes
  // the table for so many operations, or as many as it must have or can. Throws Error where there is no memory for it.
  HostTable(const Segment& segment, std::vector<int> ranks, int local_rank, size_t places, bool several_hosts);

  struct Arriving {
    Key key;
    const std::string* name;
    const std::string* signature;
    const std::string* refusal;  // null: none
    Operation operation;
    uint64_t slot;
    uint32_t chunks;
    int32_t owner;
    uint64_t placement = 0;
    Key first = {};      // of the operation's first part
    Due due = Due::now;  // whether a rank may make an entry for it; it always joins those that others have made
  };
  // So many operations are due, the oldest of a rank and those that it was asked for next. Where all ranks are asked
  // for their operations in the same order, the oldest therefore finds a place, whatever waits for it. So it does where
  // the orders differ, if it is due on some rank of each host.
  uint64_t window() const { return window_; }
  // Brings this rank's offer. `inline_limit`: an operation of at most so many bytes is not put into the log when it
  // becomes ready: the rank that came last (ArriveResult::last) must do all of it and call finish_chunks().
  // `claim` is called under the table's lock, before anybody can see the arrival, with the entry's number.
  template <class Claim>
  ArriveResult arrive(const Arriving& offer, size_t inline_limit, Claim&& claim) {
    for (;;) {
      const ArriveResult arrival = lock_.run([&] {
        ArriveResult made = arrive_locked(offer);
        if (made.table_full || made.departed) return made;
        claim(made);
        if (made.last) complete_set(made, inline_limit);
        return made;
      });
      if (!arrival.needs_memory || !commit_entries()) return arrival;
    }
  }

  Entry& entry(uint32_t index) { return *reinterpret_cast<Entry*>(entries_ + size_t{index} * stride_); }

  // The other hosts agreed (or found an error): the operation may run.
  // False where this host has given it up meanwhile, since a rank has left.
  bool agree(Key key, uint64_t sequence, const std::string& error, uint64_t placement);
  // `chunks` more pieces of the operation are finished; the last one makes it done.
  void finish_chunks(uint32_t index, uint32_t chunks);
  // Claims a chunk of this rank's own before work on it begins. False: the operation was stopped.
  bool claim_chunk(uint32_t index);
  // A chunk that was claimed comes to no end, and this rank uses no memory of the operation any more. Needs no lock.
  void drop_chunk(uint32_t index);
  // Nobody begins with another chunk; needs no lock. Whoever ends an operation with an error does it. Until it is
  // settled, others may still write what they had begun with, also into the memory of ranks that have left.
  void stop_chunks(uint32_t index);
  bool settled(uint32_t index);
  // This rank's one piece is finished, and the operation fails: all ranks find that out by themselves.
  void finish_refused(uint32_t index, const std::string& error);
  // This rank has no more business with the entry.
  void leave(uint32_t index);
  // Ends an operation with an error on all ranks of the host.
  void fail(uint32_t index, const std::string& error);
  // `rank` goes away: what waits for it on this host, and all that comes later, fails with `reason`. What was announced
  // to other hosts may have been agreed on already; that ends with their verdict, or with close().
  // `fails`: it can do no more, and so counts as the cause before one that has left with nothing undone.
  void depart(int rank, const std::string& reason, bool fails = false);
  // All hosts know that `rank` has left, and agree on nothing more.
  void close(int rank, const std::string& reason);
  // The rank that left first, or the last one that could do no more; -1: none.
  int departed_rank() const { return header_->departed_rank.load(std::memory_order_acquire) - 1; }
  Departed departed() const;  // that rank, and why
  State state(uint32_t index);

  // For those who look why nothing goes on, and must not wait themselves. Throws TableLocked when a rank keeps the
  // table locked for a second: it was stopped in the middle of a change.
  OperationState operation_state(const Key& key);
  // Whether this rank could arrive at that operation now: it is in the table, or the table has room.
  bool has_place(const Key& key, Due due);
  // Whether this rank wants to hear of entries that others make: where it finds no place for its own operations.
  void listen(bool on);
  // The key of its operation's first part; none where this rank has arrived already, or it has ended.
  std::optional<Key> made(const TableEvent& event);
  // Other local ranks that have not arrived at some operation in the table; where there is none, this one if it has
  // not.
  std::vector<int> behind();
  // Ends an operation that some rank of this host has not arrived at, which gets the error when it comes, or one that
  // is announced to the other hosts, if `announced`. False when there is no such operation.
  bool give_up(const Key& key, const std::string& reason, bool announced);
  // All that read or change the table wait for its lock, and throw Error once it was given up.
  TableLock& lock() { return lock_; }
  const TableLock& lock() const { return lock_; }
  // Throws where the table was given up, and looks now and then whether the lock's holder has died.
  void look_after_lock();
  // This rank's thread is alive, and which local ranks have not shown that for some seconds.
  void beat();
  std::vector<int> unresponsive() const;

  // The next event that this rank has not seen.
  // `overrun` is set when the log was overwritten before it was read: look at all own entries instead.
  bool next_event(TableEvent* event, bool* overrun) { return log_->next(event, overrun); }

  // The launches of this host's ranks, where this is the table of the world.
  LaunchOrder& launch_order() { return *launch_order_; }
  // Operations by NCCL get numbers from `order`; `ranks`: this host's ranks, as local ranks of the world.
  void order_launches(LaunchOrder& order, std::vector<int> ranks);
  // The number of an entry at which this rank has arrived and that it will not launch; 0: it has and gets none.
  uint64_t forgo_launch(uint32_t index);
  // The number that this rank has got for an entry at which it has arrived, or 0; looks without the lock.
  uint64_t given_launch(uint32_t index);
  // Digest of the placements of this host's ranks.
  uint64_t placement(Entry& entry) const;

  Bell& bell(int local_rank) { return bells_[local_rank]; }
  void ring_others();
  void ring_all();
  // Counts the timelines of this host's ranks that want stamps.
  std::atomic<uint32_t>& stamp_flag() { return header_->timelines; }
  bool stamping() const { return header_->timelines.load(std::memory_order_relaxed) != 0; }
  Stamps& my_stamps(Entry& entry) const { return entry.records()[local_rank_].stamps; }
  int local_size() const { return static_cast<int>(ranks_.size()); }
  int local_rank() const { return local_rank_; }
  const std::vector<int>& ranks() const { return ranks_; }

 private:
  struct alignas(64) PaddedBell : Bell {
    std::atomic<int64_t> beat{0};  // when the rank's thread was last seen
    // Under the table's lock:
    uint32_t ahead = 0;  // entries that it has made before they were due
    bool listens = false;
  };
  struct alignas(64) Header {
    TableLock::Shared lock;
    uint32_t places;
    uint32_t used;                    // entries ever used
    std::atomic<uint32_t> committed;  // entries with memory behind them
    uint32_t free_head;               // list of entries to use again
    uint32_t listeners;
    std::atomic<int> departed_rank;  // plus one; 0: nobody
    char departure[kErrorBytes];     // why
    alignas(64) std::atomic<uint64_t> log_tail;
    TableLock::Verdict verdict;
    alignas(64) std::atomic<uint32_t> timelines;  // on a line of its own, since everybody reads it
  };
  ArriveResult arrive_locked(const Arriving& offer);
  void complete_set(ArriveResult& arrival, size_t inline_limit);
  uint32_t* bucket(const Key& key);
  uint32_t find(const Key& key);
  bool may_make(Due due) const;
  bool take_entry(ArriveResult* arrival);
  bool commit_entries();
  void end_locked(uint32_t index, const std::string& error);
  std::string disagreement(Entry& entry);
  void end_waiting(const Departed& gone, bool announced_too, bool fails);
  bool give_launches(uint32_t index);
  void tell_made(uint32_t index);
  void append(TableEvent::Type type, uint32_t index);

  const Segment& segment_;
  std::vector<int> ranks_;
  int local_rank_;
  bool several_hosts_;
  size_t stride_;
  uint32_t window_;
  uint32_t most_ahead_;
  Header* header_;
  PaddedBell* bells_;
  LaunchOrder* launch_order_;             // in this table
  LaunchOrder* used_launches_ = nullptr;  // null: nothing goes by NCCL
  std::vector<int> launching_ranks_;
  uint32_t* buckets_;
  char* entries_;
  std::optional<EventLog> log_;
  int64_t looked_ = 0;  // at the lock
  mutable TableLock lock_;
};

}  // namespace mykv
