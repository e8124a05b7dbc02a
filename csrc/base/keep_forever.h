// Memory that MPI or a GPU may still use when its owner is destroyed.
#pragma once

#include <mutex>
#include <utility>
#include <vector>

#include "base/forks.h"

namespace mykv {

template <class T>
struct KeptForever {
  std::mutex mutex;
  std::vector<T> values;
};

// Never destroys `value`. It stays reachable, so that leak checkers do not report it.
template <class T>
void keep_forever(T value) {
  auto& kept = usable_in_forks<KeptForever<T>>();
  std::lock_guard<std::mutex> lock(kept.mutex);
  kept.values.push_back(std::move(value));
}

}  // namespace mykv
