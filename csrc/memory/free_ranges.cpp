#include "memory/free_ranges.h"

namespace mykv {

void FreeRanges::add(size_t begin, size_t bytes) {
  const auto behind = bytes_.find(begin + bytes);
  if (behind != bytes_.end()) {
    bytes += behind->second;
    erase(behind);
  }
  const size_t first = take_before(begin);
  insert(first, bytes + (begin - first));
}

std::optional<size_t> FreeRanges::find(size_t bytes) const {
  const auto range = sizes_.lower_bound({bytes, 0});
  if (range == sizes_.end()) return std::nullopt;
  return range->second;
}

void FreeRanges::take(size_t begin, size_t bytes) {
  const auto range = bytes_.find(begin);
  const size_t rest = range->second - bytes;
  erase(range);
  if (rest > 0) insert(begin + bytes, rest);
}

size_t FreeRanges::take_before(size_t end) {
  auto range = bytes_.lower_bound(end);
  if (range == bytes_.begin()) return end;
  --range;
  const size_t begin = range->first;
  if (begin + range->second != end) return end;
  erase(range);
  return begin;
}

void FreeRanges::insert(size_t begin, size_t bytes) {
  bytes_.emplace(begin, bytes);
  sizes_.emplace(bytes, begin);
}

void FreeRanges::erase(ByAddress::iterator range) {
  sizes_.erase({range->second, range->first});
  bytes_.erase(range);
}

}  // namespace mykv
