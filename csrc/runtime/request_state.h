// The state of a posted request. It is cut into parts, which ranks match one by one.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "operations/request.h"
#include "timeline/records.h"
#include "transport/transport.h"

namespace mykv {

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

}  // namespace mykv
