// Free ranges of address space. Adjacent ranges are merged, so memory released in pieces can be taken as a whole.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace mykv {

class FreeRanges {
 public:
  // Adds a range. It must not overlap any free range.
  void add(size_t begin, size_t bytes);
  // The start of the smallest range of at least `bytes` bytes; of equally small ranges, the one with the lowest
  // address.
  std::optional<size_t> find(size_t bytes) const;
  // Takes `bytes` from the range that begins at `begin`; the rest of the range stays free.
  void take(size_t begin, size_t bytes);
  // Takes the range that ends at `end`, if there is such a range; returns its start, or `end`.
  size_t take_before(size_t end);

 private:
  using ByAddress = std::map<size_t, size_t>;
  void insert(size_t begin, size_t bytes);
  void erase(ByAddress::iterator range);

  ByAddress bytes_;                            // bytes of each range, by its start
  std::set<std::pair<size_t, size_t>> sizes_;  // the same ranges as (bytes, begin)
};

}  // namespace mykv
