// Free ranges of address space. Neighbours become one range, so what was given back in pieces can be taken as a whole.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace mykv {

class FreeRanges {
 public:
  // Adds a range that overlaps none of those that are there.
  void add(size_t begin, size_t bytes);
  // Where the smallest range of at least `bytes` begins, of several the one with the lowest address.
  std::optional<size_t> find(size_t bytes) const;
  // Takes `bytes` from the range that begins there; the rest of it stays.
  void take(size_t begin, size_t bytes);
  // Takes the range that ends there, if there is one; returns where it begins, or `end`.
  size_t take_before(size_t end);

 private:
  using ByAddress = std::map<size_t, size_t>;
  void insert(size_t begin, size_t bytes);
  void erase(ByAddress::iterator range);

  ByAddress bytes_;                            // by begin
  std::set<std::pair<size_t, size_t>> sizes_;  // the same ranges as (bytes, begin)
};

}  // namespace mykv
