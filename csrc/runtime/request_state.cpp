#include "runtime/request_state.h"

#include <algorithm>

namespace mykv {

void RequestState::cut(size_t part_bytes) {
  const Operation& op = request.operation;
  part_elements = std::max<size_t>(1, request.in_place ? op.count : part_bytes / item_size(op.dtype));
  if (op.road == Road::nccl) {
    part_elements = op.count;  // NCCL divides the request itself
    return;
  }
  if (!request.refusal.empty()) return;  // one part tells the other ranks
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

}  // namespace mykv
