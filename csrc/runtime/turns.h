// The turns of a rank's operations: the number of the call under each name, by which the ranks match them.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "operations/operation.h"
#include "operations/request.h"

namespace mykv {

// Thread-safe.
class Turns {
 public:
  // Takes the next turn under `name`. Call it in the order of the program's calls.
  uint64_t take(const std::string& name);
  // The next number in the order of the program's calls, for one request.
  std::shared_ptr<const Ticket> take_ticket() { return tickets_->take(); }
  // The last turn taken under `name`.
  uint64_t last(const std::string& name);
  // For each name: the key of this rank's next operation, which it has not started. With `turn_of`: the key with the
  // last turn under `turn_of`.
  std::vector<Key> next_keys(const std::vector<std::string>& names, const std::string& turn_of);
  // Drops the counters of all names that begin with `prefix`.
  void forget(const std::string& prefix);
  // The number of names that have counters.
  size_t names();

 private:
  const std::shared_ptr<Tickets> tickets_ = std::make_shared<Tickets>();
  std::mutex mutex_;
  std::unordered_map<std::string, uint64_t> turns_;  // turns taken under each name
};

}  // namespace mykv
