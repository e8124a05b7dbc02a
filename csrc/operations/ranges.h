// A range of an operation's elements, and its overlaps with places: memory that holds some of the elements.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace mykv {

struct Range {
  size_t begin;
  size_t end;
  size_t count() const { return end - begin; }
};

// Calls use(place, common elements) for each place that shares elements with the range.
template <class Place, class Use>
void for_overlaps(const std::vector<Place>& places, const Range& range, Use&& use) {
  auto place = std::partition_point(places.begin(), places.end(),
                                    [&](const Place& p) { return p.begin + p.count <= range.begin; });
  for (; place != places.end() && place->begin < range.end; ++place) {
    use(*place, Range{std::max(range.begin, place->begin), std::min(range.end, place->begin + place->count)});
  }
}

// The address of an element in a place that holds it.
template <class Place>
char* address_in(const Place& place, size_t element, size_t width) {
  return static_cast<char*>(const_cast<void*>(static_cast<const void*>(place.data))) + (element - place.begin) * width;
}

// The address of the range if a single place holds all of it, or null.
template <class Place>
char* one_place(const std::vector<Place>& places, const Range& range, size_t width) {
  char* found = nullptr;
  for_overlaps(places, range, [&](const Place& place, const Range& both) {
    if (both.count() == range.count()) found = address_in(place, range.begin, width);
  });
  return found;
}

}  // namespace mykv
