// A rank's open requests, shared by all its threads: posted requests, their parts in the host's table, and the staging
// memory that they use.
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

// The posting thread itself copies a share of at most this size in, even if the staging memory is used up.
constexpr size_t kPostInlineBytes = 32 << 10;

// The elements of one part, and the root of their shard.
struct Piece {
  size_t begin;
  size_t count;
  int32_t root;
};

// A posted request and its progress. It is cut into parts, which ranks match one by one. Requests::mutex_ guards the
// counters.
struct RequestState {
  // Cuts the request into parts of at most `part_bytes` bytes. In a request in place each shard is one part.
  void cut(size_t part_bytes);
  Piece piece(size_t number) const;

  Request request;
  uint64_t number = 0;  // number of its first part; Transport::owner() rotates owners by it
  uint64_t age = 0;     // position in the order of the program's calls
  // For several hosts and several parts: the position of the first part in the agreed order, once it is known.
  std::optional<uint64_t> sequence;
  size_t part_elements = 0;
  std::vector<Piece> pieces;  // the parts of a request with shards; otherwise empty
  size_t parts = 1;
  size_t next = 0;       // number of the next part to send to the host's table
  size_t met = 0;        // parts that were entered in the host's table
  size_t under_way = 0;  // parts sent and not finished
  size_t finished = 0;
  bool lingers = false;       // the posting thread spins for the request; used by that thread only
  bool agreed = false;        // the ranks have compared the operation, so all of them send all its parts
  bool ended = false;         // a thread has claimed the end: it calls done, or has called it
  size_t happened = 0;        // events of request.devices->after that have completed; runtime's thread only
  uint64_t held_in_pass = 0;  // see DeviceParts::take_copied_in(); runtime's thread only
  Failure error;
  bool recorded = false;  // the timeline records the request; constant after the request was posted, like `begun`
  int64_t begun = 0;
  std::unique_ptr<RequestRecord> record;  // until the end of the request; see TimelineNotes
};

// One part of a request. It has one entry of the host's table.
struct Part {
  std::shared_ptr<RequestState> posted;
  size_t number = 0;
  size_t begin = 0;  // the part's elements are [begin, begin + count)
  size_t count = 0;
  uint64_t slot = 0;
  size_t slot_bytes = 0;
  LongText long_text;      // see HostTable::Arriving
  LocalShare share;        // used instead of a slot
  uint64_t placement = 0;  // for NCCL: a digest of the part's GPUs
  uint32_t entry = 0;
  uint32_t generation = 0;
  Key key;
  int64_t since = 0;  // when it was entered in the host's table; coarse_now_ns()
  int64_t came = 0;   // the time just before `since`; now_ns()
  bool started = false;
  bool announced = false;
  bool large = false;   // has more bytes than kPostInlineBytes
  bool staged = false;  // uses a pinned slot (DeviceParts); counts as under way from the start of copying in
  // For the timeline.
  int64_t copied_in = 0;  // start of copying in
  struct {
    int64_t agreed = 0;  // when all hosts had agreed
    std::vector<ArrivalRecord> arrivals;
  } hosts;
};

inline Range range_of(const Part& part) { return {part.begin, part.begin + part.count}; }

// Statistics of a rank in a group: completed operations, their bytes, and how long the rank waited.
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
  // All ranks have arrived at the request's first part, and this rank waited `waited` ns for them. ended() follows.
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
  int64_t step_waited_ns = 0;  // only of operations with StepPhase::last
  uint64_t steps = 0;
};

// Thread-safe. Each method locks the mutex once. add() is called under the table's lock, so a method that used the
// table while it holds the mutex could deadlock.
class Requests {
 public:
  // See RuntimeOptions.
  Requests(size_t part_bytes, size_t staging_bytes) : part_bytes_(part_bytes), staging_bytes_(staging_bytes) {}
  // Only for the lock-order check.
  std::mutex& mutex() { return mutex_; }

  // Functions for posting requests.

  // Registers a request. `direct`: the calling thread sends its only part; otherwise the runtime's thread does.
  // Throws Error with the reason after refuse_new() or close().
  void take_over(const std::shared_ptr<RequestState>& posted, bool direct);
  // After a verdict on the table: hands a request to the runtime's thread, which is about to end all requests. Returns
  // empty if the thread ends this request or has ended it, otherwise the reason why no request is accepted.
  Failure leave_to_thread(const std::shared_ptr<RequestState>& posted);
  std::vector<std::shared_ptr<RequestState>> take_posted();
  // Rejects new requests from now on. False if they are already rejected.
  bool refuse_new(const Failure& reason);
  bool refuses_new();
  // Name of the oldest operation that this rank has refused and that some rank has not reached; empty: none.
  std::string pending_refusal();
  // Whether this rank has no parts under way.
  bool idle();
  bool has_ended(const RequestState& posted);
  // Claims the end of the request: true for one caller, which must end it.
  bool claim_end(RequestState& posted);
  // Rejects new requests and drops all parts. Returns the requests that the caller must end: posted requests, requests
  // of the dropped parts, and open requests of `others`.
  std::vector<std::shared_ptr<RequestState>> close(const Failure& reason,
                                                   std::vector<std::shared_ptr<RequestState>> others);

  // Functions for sending parts, which only the runtime's thread calls.

  // Whether the staging limit allows another slot.
  bool has_room();
  enum class Next { part, none, not_yet, no_room };
  // Takes the number of the request's next part, and the reason if this rank refuses it (else empty). `room`:
  // has_room().
  Next take_next(RequestState& posted, bool room, size_t* number, std::string* refusal);
  // Undoes take_next(): the part was not sent.
  void put_back(RequestState& posted);
  // Notes the request that found no room in the host's table, and the time. Null: there is room.
  void set_crowded_out(const RequestState* posted);
  // Only for the runtime's thread, which sets it.
  bool is_crowded_out() const { return crowded_out_since_ != 0; }

  // Functions for parts under way.

  // Counts the slots of a staged part as used.
  void take_slots(const Part& part, size_t slots);
  // Counts slots of `bytes` bytes as released or lost.
  void release_bytes(size_t bytes);
  // Registers a part that was entered in the host's table.
  void add(const Part& part);
  // Registers a part without an entry, since a rank has left. The part ends at once.
  void add_without_entry(const Part& part);
  // Claims the announcement of this entry's part to the other hosts: true for the first caller only.
  bool announce(uint32_t entry, uint32_t generation);
  // The part of an entry at which all ranks have arrived. `first`: this call is the first, so the part begins now.
  std::optional<Part> begin(uint32_t entry, uint32_t generation, bool* first);
  // For the timeline: the time at which all hosts had agreed on the part.
  void note_hosts(uint32_t entry, uint32_t generation, int64_t agreed, std::vector<ArrivalRecord> hosts);
  // Removes and returns the part; empty if another thread has removed it, or if `stays(part)`.
  template <class Stays>
  std::optional<Part> take(uint32_t entry, uint32_t generation, Stays&& stays) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = find(entry, generation);
    if (it == parts_.end() || stays(static_cast<const Part&>(it->second))) return {};
    return take_out(it);
  }
  std::optional<Part> take(uint32_t entry, uint32_t generation);
  // The same for any generation of the entry.
  std::optional<Part> take(uint32_t entry);
  // Removes a part after a verdict on the table, so that the runtime's thread no longer touches its arrays. False if
  // that thread has started or removed the part; it then ends the part.
  bool withdraw(const Part& part);
  // Counts a part as finished. True if it was the request's last part: the caller must end the request. `waited_ns`:
  // how long the part waited for other ranks.
  bool finish(const Part& part, const Failure& error, int64_t waited_ns);

  // Functions that read the state.

  Totals totals();
  // Entries of this rank's parts, with their generations.
  std::vector<std::pair<uint32_t, uint32_t>> generations();
  std::vector<uint32_t> entries();
  struct Under {
    bool parts;  // any part is in the host's table
    bool large;  // any large part is
  };
  Under under_way();
  // Start (coarse_now_ns()) of the longest wait: of a part, or of the request that found no room; `now` if none waits.
  int64_t oldest(int64_t now);
  // The oldest part of each request that has waited for `least_seconds` until `*now` (coarse_now_ns()). The oldest come
  // first, and requests that this rank has refused come last. If `name` is not empty: only requests of that name.
  std::vector<Part> waiting(double least_seconds, const std::string& name, int64_t* now);
  // Name of the request that found no room in the host's table, and the start of its wait; 0: there is room.
  std::pair<std::string, int64_t> crowded_out();
  // Keys of the parts that arrived under these names until `came_before`, each with the reason given for its name.
  std::vector<std::pair<Key, Failure>> named(const std::unordered_map<std::string, Failure>& reasons,
                                             int64_t came_before);

 private:
  using Clock = std::chrono::steady_clock;
  using ByEntry = std::unordered_map<uint32_t, Part>;
  ByEntry::iterator find(uint32_t entry, uint32_t generation);
  Part take_out(ByEntry::iterator it);

  const size_t part_bytes_;
  const size_t staging_bytes_;
  std::mutex mutex_;  // guards the members below, and the counters of each RequestState
  std::vector<std::shared_ptr<RequestState>> posted_;  // not yet seen by the runtime's thread
  ByEntry parts_;                                      // parts of this rank in the host's table
  Failure stopped_;                                    // why requests are rejected; empty: they are not

  size_t staged_bytes_ = 0;
  size_t moving_parts_ = 0;  // large parts in slots, at which all ranks have arrived
  size_t large_parts_ = 0;
  Clock::time_point moved_;        // last time at which a slot was taken within the limit, or released
  int64_t crowded_out_since_ = 0;  // coarse_now_ns(); 0: the host's table has room
  std::string crowded_out_;        // the name of the request that found no room
  Totals totals_;
};

}  // namespace mykv
