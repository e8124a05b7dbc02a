// Which elements of an operation a part has, and what of them lies in each of several places.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "runtime/flight.h"

namespace mykv {

struct Range {
  size_t begin;
  size_t end;
  size_t count() const { return end - begin; }
};

inline Range range_of(const Part& part) { return {part.begin, part.begin + part.count}; }

// Calls use(place, common elements) for all places that share elements with the range.
template <class Place, class Use>
void for_overlaps(const std::vector<Place>& places, const Range& range, Use&& use) {
  auto place = std::partition_point(places.begin(), places.end(),
                                    [&](const Place& p) { return p.begin + p.count <= range.begin; });
  for (; place != places.end() && place->begin < range.end; ++place) {
    use(*place, Range{std::max(range.begin, place->begin), std::min(range.end, place->begin + place->count)});
  }
}

}  // namespace mykv
