// Flights with parts to send, by falling priority and by age, and on demand by key.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <unordered_map>
#include <utility>

#include "runtime/request_state.h"

namespace mykv {

class SendQueue {
  using ByPriority = std::multimap<int64_t, std::shared_ptr<RequestState>>;
  using Age = std::pair<uint64_t, const RequestState*>;
  using ByAge = std::map<Age, ByPriority::iterator>;

 public:
  using Place = ByPriority::iterator;

  void add(const std::shared_ptr<RequestState>& flight) {
    const Place place = flights_.emplace(-int64_t{flight->request.operation.priority}, flight);
    ages_.emplace(age_of(*flight), place);
    if (indexed_) index_.emplace(key_of(*flight), place);
  }
  void erase(Place place) {
    ages_.erase(age_of(*place->second));
    if (indexed_) {
      const auto found = index_.find(key_of(*place->second));
      if (found != index_.end() && found->second == place) index_.erase(found);
    }
    if (look_ == place) ++look_;
    flights_.erase(place);
  }
  void clear() {
    ages_.clear();
    index_.clear();
    sequences_.clear();
    flights_.clear();
    look_ = flights_.end();
  }

  bool empty() const { return flights_.empty(); }
  Place begin() { return flights_.begin(); }
  Place end() { return flights_.end(); }
  // In the order in which they were asked for; each `second` is a place.
  const ByAge& by_age() const { return ages_; }
  // All hosts have agreed on the first part of a flight of several.
  void agree(RequestState& flight, uint64_t sequence) {
    if (ages_.count(age_of(flight)) == 0) return;  // it has no other
    flight.sequence = sequence;
    sequences_.insert(sequence);
  }
  // Whether it is the one that they agreed on first, of those of which this rank has not brought all parts.
  bool is_first_agreed(const RequestState& flight) const {
    return flight.sequence && !sequences_.empty() && *flight.sequence == *sequences_.begin();
  }
  // All parts have arrived.
  void forget(const RequestState& flight) {
    if (flight.sequence) sequences_.erase(*flight.sequence);
  }
  // The key of a flight's first part. To be looked up by it, flights must be indexed.
  static Key key_of(const RequestState& flight) { return make_key(flight.request.name, flight.request.turn, 0); }
  void index() {
    indexed_ = true;
    for (Place place = begin(); place != end(); ++place) index_.emplace(key_of(*place->second), place);
  }
  void forget_index() {
    indexed_ = false;
    index_.clear();
  }
  Place find(const Key& key) {
    const auto found = index_.find(key);
    return found == index_.end() ? end() : found->second;
  }
  // Where a look through all of them was broken off; end(): nowhere.
  Place look() const { return look_; }
  void look_next(Place place) { look_ = place; }

 private:
  struct Hash {
    size_t operator()(const Key& key) const { return key.low; }
  };
  static Age age_of(const RequestState& flight) { return {flight.age, &flight}; }

  ByPriority flights_;
  ByAge ages_;
  bool indexed_ = false;
  std::unordered_map<Key, Place, Hash> index_;
  std::set<uint64_t> sequences_;
  Place look_ = flights_.end();
};

}  // namespace mykv
