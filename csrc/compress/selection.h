// Selects the elements with the k largest keys; of equal keys, the key with the lower index counts as larger.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

namespace mykv::compress {

// Reusable memory.
template <class Key>
struct Selection {
  std::vector<uint32_t> indices;  // the result, in ascending order
  std::vector<Key> keys;
  std::vector<Key> order;
};

// collect(indices, keys, bound) finds all elements whose keys are at least `bound`, in the order of their indices, and
// returns their number. `guess`: a bound that at least k keys should reach, and few more; if fewer keys reach it, all
// `count` elements are looked at.
template <class Key, class Collect>
void select_largest(Selection<Key>& found, size_t count, size_t k, Key guess, Collect&& collect) {
  found.indices.resize(count);
  found.keys.resize(count);
  size_t candidates = collect(found.indices.data(), found.keys.data(), guess);
  if (candidates < k) candidates = collect(found.indices.data(), found.keys.data(), Key{0});
  if (candidates > k) {
    found.order.assign(found.keys.begin(), found.keys.begin() + static_cast<std::ptrdiff_t>(candidates));
    const auto last = found.order.begin() + static_cast<std::ptrdiff_t>(k - 1);
    std::nth_element(found.order.begin(), last, found.order.end(), std::greater<>());
    const Key least = *last;
    const auto larger = std::count_if(found.order.begin(), last, [least](Key key) { return key > least; });
    size_t equal = k - static_cast<size_t>(larger);  // how many elements with the least key belong to the k
    size_t kept = 0;
    for (size_t i = 0; i < candidates; ++i) {
      if (found.keys[i] < least || (found.keys[i] == least && equal == 0)) continue;
      if (found.keys[i] == least) --equal;
      found.indices[kept++] = found.indices[i];
    }
  }
}

}  // namespace mykv::compress
