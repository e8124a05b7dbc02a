// A posted request and how far it is. It is cut into parts that are matched one by one.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "operations/ranges.h"
#include "operations/request.h"
#include "timeline/records.h"
#include "transport/transport.h"

namespace mykv {

// Shares up to this size are copied in by the thread that posts them, whether there is room or not.
constexpr size_t kPostInlineBytes = 32 << 10;

// Which elements a part has, and their root.
struct Piece {
  size_t begin;
  size_t count;
  int32_t root;
};

// A request under way. Its counters are guarded by Runtime::mutex_.
struct RequestState {
  // Cuts the request into parts of at most so many elements; of a request in place each shard is one.
  void cut(size_t part_bytes);
  Piece piece(size_t number) const;

  Request request;
  uint64_t number = 0;  // of its first part, among the parts of all requests; see Transport::owner
  uint64_t age = 0;     // the number of its ticket
  // Of several parts between hosts, when these have agreed on the first: its place in their order.
  std::optional<uint64_t> sequence;
  size_t part_elements = 0;
  std::vector<Piece> pieces;  // of a request with shards
  size_t parts = 1;
  size_t next = 0;       // the next part to send
  size_t met = 0;        // parts that have arrived in the host's table
  size_t under_way = 0;  // parts sent and not finished
  size_t finished = 0;
  bool agreed = false;  // all ranks brought the same operation, and so send all of its parts
  bool ended = false;   // done was called
  size_t happened = 0;  // of request.devices->after; of the runtime's thread alone
  std::string error;
  bool recorded = false;  // by the timeline; never changes, as the next one
  int64_t begun = 0;
  std::unique_ptr<RequestRecord> record;  // until the end of the request
};

// One part of a request, in the host's table under one entry.
struct Part {
  std::shared_ptr<RequestState> posted;
  size_t number = 0;
  size_t begin = 0;  // elements
  size_t count = 0;
  uint64_t slot = 0;
  size_t slot_bytes = 0;
  LocalShare share;        // instead of a slot
  uint64_t placement = 0;  // of one by NCCL: a digest of its GPUs
  uint32_t entry = 0;
  uint32_t generation = 0;
  Key key;
  int64_t since = 0;  // it is in the host's table; coarse_now_ns()
  bool started = false;
  bool announced = false;
  bool large = false;   // more than kPostInlineBytes
  bool staged = false;  // its slot is one of Staged::slots, and it is counted as under way since it took that
  // For the timeline.
  int64_t copied_in = 0;  // since when
  int64_t agreed = 0;     // by all hosts
  std::vector<ArrivalRecord> hosts;
};

inline Range range_of(const Part& part) { return {part.begin, part.begin + part.count}; }

}  // namespace mykv
