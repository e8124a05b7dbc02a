// The requests of a rank that have not ended, as all its threads see them: what was posted, the parts that lie in the
// host's table, and the memory that they take.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "operations/request.h"
#include "timeline/records.h"
#include "transport/transport.h"

namespace mykv {

// The state of a posted request. It is cut into parts, which ranks match one by one.

// The thread that posts a share of at most this size copies it in, whether there is room or not.
constexpr size_t kPostInlineBytes = 32 << 10;

// The elements of a part, and their root.
struct Piece {
  size_t begin;
  size_t count;
  int32_t root;
};

// A request under way. Its counters are guarded by Requests::mutex_.
struct RequestState {
  // Cuts the request into parts of at most `part_bytes` bytes; of a request in place each shard is a part.
  void cut(size_t part_bytes);
  Piece piece(size_t number) const;

  Request request;
  uint64_t number = 0;  // the number of its first part for Transport::owner(), which lets owners take turns
  uint64_t age = 0;     // the number of its ticket
  // For several hosts and several parts: the position of the first part in the agreed order, once it is known.
  std::optional<uint64_t> sequence;
  size_t part_elements = 0;
  std::vector<Piece> pieces;  // of a request with shards
  size_t parts = 1;
  size_t next = 0;       // the next part that goes to the host's table
  size_t met = 0;        // parts that have arrived in the host's table
  size_t under_way = 0;  // parts sent and not finished
  size_t finished = 0;
  bool lingers = false;  // the thread that posts it stays awake for it; used by that thread only
  bool agreed = false;   // all ranks brought the same operation, and so bring all of its parts
  bool ended = false;    // done was called, or is about to be
  size_t happened = 0;   // how many of request.devices->after have; used by the runtime's thread only
  Cause error;
  bool recorded = false;  // by the timeline; `recorded` and `begun` never change
  int64_t begun = 0;
  std::unique_ptr<RequestRecord> record;  // until the end of the request; see TimelineNotes
};

// One part of a request, in the host's table under one entry.
struct Part {
  std::shared_ptr<RequestState> posted;
  size_t number = 0;
  size_t begin = 0;  // elements
  size_t count = 0;
  uint64_t slot = 0;
  size_t slot_bytes = 0;
  LongText long_text;      // see HostTable::Arriving
  LocalShare share;        // used instead of a slot
  uint64_t placement = 0;  // by NCCL: a digest of the part's GPUs
  uint32_t entry = 0;
  uint32_t generation = 0;
  Key key;
  int64_t since = 0;  // when it arrived in the host's table; coarse_now_ns()
  int64_t came = 0;   // when it was about to arrive there; now_ns()
  bool started = false;
  bool announced = false;
  bool large = false;   // more than kPostInlineBytes
  bool staged = false;  // its slot is pinned (DeviceParts); it counts as under way since it took the slot
  // For the timeline.
  int64_t copied_in = 0;  // when copying in began
  struct {
    int64_t agreed = 0;  // when all hosts had
    std::vector<ArrivalRecord> arrivals;
  } hosts;
};

inline Range range_of(const Part& part) { return {part.begin, part.begin + part.count}; }

// What a rank has done in a group, for the statistics: its operations, their bytes and how long it waited.

// Operations that have ended with a result.
struct Totals {
  enum Way : uint8_t { in_place, copied, staged, nccl };
  static constexpr std::array<const char*, 4> kWays = {"in_place", "copied", "through_host", "nccl"};
  struct Count {
    uint64_t operations = 0;
    uint64_t bytes = 0;
  };

  static Way way_of(const Request& request) {
    if (request.operation.road == DataPath::nccl) return nccl;
    if (request.operation.road == DataPath::staged) return staged;
    return request.in_place ? in_place : copied;
  }
  // An operation has met at all ranks after this time. Later it ends.
  void met(const Request& request, int64_t waited) {
    waited_ns += waited;
    if (request.step == StepPhase::last) step_waited_ns += waited;
  }
  void ended(const Request& request) {
    Count& count = ways[way_of(request)];
    ++count.operations;
    count.bytes += request.operation.bytes();
    steps += request.step == StepPhase::last;
  }

  std::array<Count, 4> ways;
  int64_t waited_ns = 0;
  int64_t step_waited_ns = 0;  // of the operations that are StepPhase::last
  uint64_t steps = 0;
};

// Thread-safe. Each method takes the mutex once. add() is called under the table's lock, so no method may use the
// table.
class Requests {
 public:
  // See RuntimeOptions.
  Requests(size_t part_bytes, size_t staging_bytes) : part_bytes_(part_bytes), staging_bytes_(staging_bytes) {}
  // For the order of locks only.
  std::mutex& mutex() { return mutex_; }

  // Posting.
  // Takes a request over, for the runtime's thread, or (`direct`) for the calling thread, which sends its only part.
  // Throws Error with the reason if no request is taken any more.
  void take_over(const std::shared_ptr<RequestState>& posted, bool direct);
  // After a verdict on the table: leaves a request to the runtime's thread, which is about to end all. Returns why no
  // request is taken any more; empty: the thread ends this request, or it has ended.
  Cause leave_to_thread(const std::shared_ptr<RequestState>& posted);
  std::vector<std::shared_ptr<RequestState>> take_posted();
  // No request is taken any more. False: that was so already, for another reason.
  bool refuse_new(const Cause& reason);
  bool refuses_new();
  // What this rank has refused and the other ranks have not all come to; empty: nothing. The oldest one.
  std::string pending_refusal();
  // Whether this rank has no part under way.
  bool idle();
  bool has_ended(const RequestState& posted);
  // Whether the caller must end the request; true once.
  bool claim_end(RequestState& posted);
  // Refuses new requests, and forgets all parts. Returns the requests that the caller must end: posted requests,
  // requests of these parts, and those of `others` that have not ended.
  std::vector<std::shared_ptr<RequestState>> close(const Cause& reason,
                                                   std::vector<std::shared_ptr<RequestState>> others);

  // Sending, by the runtime's thread.
  // Whether another slot may be taken.
  bool has_room();
  enum class Next { part, none, not_yet, no_room };
  // Takes the number of the request's next part, and why this rank refuses it (empty: it does not). `room`: has_room().
  Next take_next(RequestState& posted, bool room, size_t* number, std::string* refusal);
  // The part that was taken last did not go.
  void put_back(RequestState& posted);
  // The host's table has no room for this request, and so for no other request; null: it has room.
  void set_crowded_out(const RequestState* posted);
  // For the runtime's thread, which alone sets it.
  bool is_crowded_out() const { return crowded_out_since_ != 0; }

  // Parts.
  // A staged part has taken this many slots of its size.
  void take_slots(const Part& part, size_t slots);
  // Slots of so many bytes were released, or are lost.
  void release_bytes(size_t bytes);
  // The part has arrived in the host's table.
  void add(const Part& part);
  // The part will not arrive, since a rank has left; it ends at once.
  void add_without_entry(const Part& part);
  // All hosts are to agree on the part of this entry; true once.
  bool announce(uint32_t entry, uint32_t generation);
  // All ranks have brought the part. `first`: it begins now.
  std::optional<Part> begin(uint32_t entry, uint32_t generation, bool* first);
  // For the timeline: when all hosts had agreed on the part.
  void note_hosts(uint32_t entry, uint32_t generation, int64_t agreed, std::vector<ArrivalRecord> hosts);
  // Takes the part out; empty if another thread has taken it, or if `stays`.
  template <class Stays>
  std::optional<Part> take(uint32_t entry, uint32_t generation, Stays&& stays) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = find(entry, generation);
    if (it == parts_.end() || stays(static_cast<const Part&>(it->second))) return {};
    return take_out(it);
  }
  std::optional<Part> take(uint32_t entry, uint32_t generation);
  // Takes the part of any generation out.
  std::optional<Part> take(uint32_t entry);
  // Takes a part back after a verdict on the table, so that the thread does not touch its arrays any more; false if the
  // thread has started the part or taken it, and will end it.
  bool withdraw(const Part& part);
  // Counts a part as finished; whether it was the request's last part, so that the caller must end the request.
  // `waited_ns`: how long the part waited for other ranks.
  bool finish(const Part& part, const Cause& error, int64_t waited_ns);

  // What there is.
  Totals totals();
  // The entries at which this rank has arrived and that it has not left, with their generations.
  std::vector<std::pair<uint32_t, uint32_t>> generations();
  std::vector<uint32_t> entries();
  struct Under {
    bool parts;  // some part is in the host's table
    bool large;  // some large part is
  };
  Under under_way();
  // Since when (coarse_now_ns()) the oldest part waits, or the request that found no room; at the latest `now`.
  int64_t oldest(int64_t now);
  // The oldest part of each request that has waited for `least_seconds` until `*now` (coarse_now_ns()), the oldest
  // first; only under `name`, unless it is empty.
  std::vector<Part> waiting(double least_seconds, const std::string& name, int64_t* now);
  // The name of the request that found no room in the host's table, and since when; 0: there is room.
  std::pair<std::string, int64_t> crowded_out();
  // The parts whose requests have these names, with the reason for each name.
  std::vector<std::pair<Key, Cause>> named(const std::unordered_map<std::string, Cause>& reasons, int64_t came_before);

 private:
  using Clock = std::chrono::steady_clock;
  using ByEntry = std::unordered_map<uint32_t, Part>;
  ByEntry::iterator find(uint32_t entry, uint32_t generation);
  Part take_out(ByEntry::iterator it);

  const size_t part_bytes_;
  const size_t staging_bytes_;
  std::mutex mutex_;                                   // guards all that follows, and counters of each RequestState
  std::vector<std::shared_ptr<RequestState>> posted_;  // for the thread to take over
  ByEntry parts_;                                      // parts of this rank in the host's table
  Cause stopped_;                                      // why no request is taken any more
  size_t staged_bytes_ = 0;
  size_t moving_parts_ = 0;  // large parts in slots, at which all ranks have arrived
  size_t large_parts_ = 0;
  Clock::time_point moved_;        // when a slot was last taken within the limit, or released
  int64_t crowded_out_since_ = 0;  // coarse_now_ns(); 0: the host's table has room
  std::string crowded_out_;        // the name of the request that found no room
  Totals totals_;
};

}  // namespace mykv
