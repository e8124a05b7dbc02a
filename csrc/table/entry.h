// The table's entry for one part of an operation, in shared memory: its state, and a record per rank.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <iterator>

#include "base/error.h"
#include "operations/operation.h"
#include "timeline/records.h"

namespace mykv {

// How often a rank came last to an operation, and how long the other ranks had waited for it. One object for each rank
// is in the host's shared memory, so every rank of the host knows the slow ranks without a message.

// Written under the table's lock, and read without it: each number is right, but two numbers may be from different
// times.
struct alignas(64) Lateness {
  struct Count {
    // `waited_ns`: the mean over the ranks that waited.
    void add(int64_t waited_ns) {
      times.store(times.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
      nanoseconds.store(nanoseconds.load(std::memory_order_relaxed) + waited_ns, std::memory_order_relaxed);
    }
    std::atomic<uint64_t> times{0};
    std::atomic<int64_t> nanoseconds{0};
  };
  void add(int64_t waited_ns, bool ends_step) {
    operations.add(waited_ns);
    if (ends_step) steps.add(waited_ns);
  }
  Count operations;
  Count steps;  // only operations that are StepPhase::last
};

// A copy of a rank's Lateness, for statistics.
struct LateRank {
  LateRank(int label, const Lateness& of)
      : rank(label),
        operations(of.operations.times.load(std::memory_order_relaxed)),
        operations_ns(of.operations.nanoseconds.load(std::memory_order_relaxed)),
        steps(of.steps.times.load(std::memory_order_relaxed)),
        steps_ns(of.steps.nanoseconds.load(std::memory_order_relaxed)) {}

  int rank;
  uint64_t operations;
  int64_t operations_ns;
  uint64_t steps;
  int64_t steps_ns;
};

// Longer names are cut in messages only: ranks match operations by a hash of the whole name.
constexpr size_t kNameBytes = 160;
constexpr size_t kTextBytes = 376;    // a signature or the reason of a refusal; a longer text is in a LongText
constexpr size_t kErrorBytes = 1088;  // a message with a name and two texts

// A Failure in shared memory; all zero: none. A longer text is cut. Ranks from kMostRanks on are named only in the
// text.
struct SharedFailure {
  static constexpr size_t kMostRanks = 2048;

  bool empty() const { return text[0] == '\0'; }
  void clear() { text[0] = '\0'; }
  void set(const Failure& failure);
  Failure get() const;

  uint64_t ranks[kMostRanks / 64];  // a bit for each rank
  ErrorCode code;
  char text[kErrorBytes];
};

// A text in the segment; valid until the part of the rank that wrote it ends.
struct LongText {
  uint64_t at = 0;     // offset into the segment
  uint32_t bytes = 0;  // 0: there is none
};

// The contribution of one rank.
struct alignas(64) RankRecord {
  uint64_t signature_hash;
  uint64_t slot;       // offset into the segment
  uint64_t placement;  // for NCCL: digest of this rank's devices
  uint64_t launch;     // for NCCL: the operation's number among this rank's launches, see LaunchOrder; 0: none yet
  Stamps stamps;       // for timelines; valid only if this rank has arrived
  // The Entry::generation at which this rank arrived. Each use of an entry has a new one, so old records need no
  // clearing.
  std::atomic<uint32_t> arrived_in;
  uint8_t refused;     // this rank has refused, and `text` is the reason
  LongText long_text;  // the whole text, if `text` is truncated
  char text[kTextBytes];
};

enum class State : uint8_t {
  gathering,  // some rank of this host has not arrived
  announced,  // all ranks of this host have arrived; the other hosts have not agreed yet
  taken,      // like ready, but the rank that arrived last does all the work at once
  ready,      // all ranks everywhere have arrived with the same operation
  done,       // the result, or `error`, is set
};

// For the statistics: when the ranks of the host arrived. Times of now_ns().
struct Arrivals {
  int64_t first;
  int64_t later;     // sum over the ranks: how long after `first` each rank arrived
  int64_t complete;  // when the last rank arrived; with several hosts, replaced by the time at which the hosts agreed
  int32_t last;      // the local rank that came last
  bool ends_step;    // the operation is StepPhase::last
};

// A summary of the arrived ranks' signatures, so that comparing them needs no loop over ranks.
struct Signatures {
  uint64_t first;  // the hash of the rank that came first
  bool disagree;   // a rank has refused, or its signature differs from that of the rank that came first
};

// Note [who may touch an entry when]. An entry lives from the first arrival of a rank to the last leave().
//
//   state      who writes                                          who reads
//   free       the rank that makes the entry: every field, under   no rank
//              the table's lock (make_entry)
//   gathering  a rank that arrives, under the lock: its own        any rank, under the lock
//              record, `arrived`, `signatures`, `arrivals`
//   announced  the first rank of the host, under the lock, when    any rank, under the lock
//              the hosts have agreed: `sequence`, `placement`
//   taken,     only atomic counters, without the lock:             a rank that has arrived, without the lock, once it
//   ready      `next_chunk`, `finished_pieces`, `claimed`; a       has seen the entry's event in the log: all other
//              rank's own `stamps`; under the lock its `launch`    fields are final
//   done       the rank that ends the operation, under the lock:   a rank that has arrived, without the lock, once it
//              `state`, `error`, the stop of `next_chunk`          has seen the event `done`
//
// - A rank that has arrived may use the entry until its own leave(), and not after it: the rank that leaves last frees
//   the entry, under the lock, and the next operation may take it at once.
// - A rank that has not arrived reads an entry under the lock only. An event of the log may be of an earlier life of
//   the entry: compare `generation` first.
// - After an end with an error, chunks that ranks have begun still write into the memory of all ranks. A rank may use
//   its memory again when chunks_ended() is true.
struct alignas(64) Entry {
  Key key;
  Key first;            // key of the operation's first part
  uint32_t generation;  // number of uses of this entry
  uint32_t next;        // the next entry in the hash chain, or in the list of free entries
  State state;
  uint32_t arrived;
  std::atomic<uint32_t> left;
  Signatures signatures;
  uint64_t sequence;   // position in the order that all hosts agreed on
  uint64_t placement;  // digest of the placements of all ranks
  int32_t owner;       // the local rank that does all the work, or kAnybody
  int32_t ahead_of;    // the local rank that created the entry before its operation was due (EntryQuota), or kNobody
  Arrivals arrivals;
  Operation operation;
  std::atomic<uint32_t> next_chunk;
  std::atomic<uint32_t> finished_pieces;
  std::atomic<uint32_t> claimed;  // chunks begun when the operation was stopped, or kNotStopped
  uint32_t pieces_to_finish;
  char name[kNameBytes];
  SharedFailure error;
  // Followed by one RankRecord for each rank of the host.
  RankRecord* records() { return reinterpret_cast<RankRecord*>(this + 1); }
  const RankRecord* records() const { return reinterpret_cast<const RankRecord*>(this + 1); }
  bool has_arrived(size_t local_rank) const {
    return records()[local_rank].arrived_in.load(std::memory_order_acquire) == generation;
  }
  // When a rank arrived, for timelines; 0: it has not, or no timeline is on.
  int64_t arrival_stamp(size_t local_rank) const {
    return has_arrived(local_rank) ? records()[local_rank].stamps.get(Stamp::arrived) : 0;
  }
};

constexpr uint32_t kEntries = 1 << 16;  // maximum per table
constexpr int32_t kAnybody = -1;
constexpr int32_t kNobody = -1;
constexpr uint32_t kStopped = 1u << 31;  // in Entry::next_chunk: no rank begins another chunk
constexpr uint32_t kNotStopped = ~0u;

}  // namespace mykv
