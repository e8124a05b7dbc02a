// A range of an operation's elements, and its overlaps with spans: memory that holds some of the elements.
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

// Calls use(span, common elements) for each span that shares elements with the range.
template <class Span, class Use>
void for_overlaps(const std::vector<Span>& spans, const Range& range, Use&& use) {
  auto span =
      std::partition_point(spans.begin(), spans.end(), [&](const Span& p) { return p.begin + p.count <= range.begin; });
  for (; span != spans.end() && span->begin < range.end; ++span) {
    use(*span, Range{std::max(range.begin, span->begin), std::min(range.end, span->begin + span->count)});
  }
}

// The address of an element in a span that holds it.
template <class Span>
char* address_in(const Span& span, size_t element, size_t width) {
  return static_cast<char*>(const_cast<void*>(static_cast<const void*>(span.data))) + (element - span.begin) * width;
}

// The address of the range if a single span holds all of it, or null.
template <class Span>
char* one_span(const std::vector<Span>& spans, const Range& range, size_t width) {
  char* found = nullptr;
  for_overlaps(spans, range, [&](const Span& span, const Range& both) {
    if (both.count() == range.count()) found = address_in(span, range.begin, width);
  });
  return found;
}

}  // namespace mykv
