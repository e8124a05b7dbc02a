#include "runtime/turns.h"

#include <iterator>

namespace mykv {

uint64_t Turns::take(const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  return turns_[name]++;
}

uint64_t Turns::last(const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = turns_.find(name);
  return it == turns_.end() || it->second == 0 ? 0 : it->second - 1;
}

std::vector<Key> Turns::next_keys(const std::vector<std::string>& names, const std::string& turn_of) {
  std::vector<Key> keys;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const std::string& name : names) {
    const auto turn = turns_.find(turn_of.empty() ? name : turn_of);
    const uint64_t taken = turn == turns_.end() ? 0 : turn->second;
    keys.push_back(make_key(name, turn_of.empty() || taken == 0 ? taken : taken - 1, 0));
  }
  return keys;
}

void Turns::forget(const std::string& prefix) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = turns_.begin(); it != turns_.end();) {
    it = it->first.compare(0, prefix.size(), prefix) == 0 ? turns_.erase(it) : std::next(it);
  }
}

size_t Turns::names() {
  std::lock_guard<std::mutex> lock(mutex_);
  return turns_.size();
}

}  // namespace mykv
