// Requests with parts that have not gone to the host's table: by descending priority, by age, and on demand by key.
// Used by the runtime's thread only.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>
#include <utility>

#include "runtime/requests.h"

namespace mykv {

class SendQueue {
  using ByPriority = std::multimap<int64_t, std::shared_ptr<RequestState>>;
  using Age = std::pair<uint64_t, const RequestState*>;
  using ByAge = std::map<Age, ByPriority::iterator>;

 public:
  using Position = ByPriority::iterator;

  void add(const std::shared_ptr<RequestState>& posted) {
    const Position position = requests_.emplace(-int64_t{posted->request.operation.priority}, posted);
    ages_.emplace(age_of(*posted), position);
    if (indexed_) index_.emplace(key_of(*posted), position);
    if (indexed_) add_candidate(key_of(*posted));
  }
  void erase(Position position) {
    ages_.erase(age_of(*position->second));
    if (indexed_) {
      const auto found = index_.find(key_of(*position->second));
      if (found != index_.end() && found->second == position) index_.erase(found);
    }
    if (look_ == position) ++look_;
    requests_.erase(position);
  }
  void clear() {
    ages_.clear();
    index_.clear();
    sequences_.clear();
    candidates_.clear();
    requests_.clear();
    look_ = requests_.end();
  }

  bool empty() const { return requests_.empty(); }
  Position begin() { return requests_.begin(); }
  Position end() { return requests_.end(); }
  // The requests in the order of the program's calls; each `second` is a position.
  const ByAge& by_age() const { return ages_; }
  // Notes that all hosts have agreed on the first part of a request. Parts that are being copied from a GPU have left
  // the queue but have not arrived, so `met` is compared.
  void agree(RequestState& posted, uint64_t sequence) {
    if (posted.parts == 1 || posted.met == posted.parts) return;  // no other part has yet to arrive
    posted.sequence = sequence;
    sequences_.insert(sequence);
  }
  // Whether this request is the first, in the hosts' agreed order, of the requests that have parts yet to arrive.
  bool is_first_agreed(const RequestState& posted) const {
    return posted.sequence && !sequences_.empty() && *posted.sequence == *sequences_.begin();
  }
  // Forgets the agreed position of a request all of whose parts have arrived.
  void forget(const RequestState& posted) {
    if (posted.sequence) sequences_.erase(*posted.sequence);
  }
  // The key of a request's first part.
  static Key key_of(const RequestState& posted) { return make_key(posted.request.name, posted.request.turn, 0); }

  // While a request finds no room in the host's table, this rank subscribes to entries that other ranks create. The
  // queue then has an index by key, and a list of candidates: requests for which another rank may have created an
  // entry.
  bool is_subscribed() const { return indexed_; }
  void subscribe() {
    indexed_ = true;
    for (Position position = begin(); position != end(); ++position)
      index_.emplace(key_of(*position->second), position);
    add_candidates();
  }
  void unsubscribe() {
    indexed_ = false;
    index_.clear();
    candidates_.clear();
  }
  // Another rank may have created an entry for the request with this key.
  void add_candidate(const Key& key) {
    if (indexed_) candidates_.push_back(key);
  }
  // Other ranks may have created entries for any request without this rank's knowledge.
  void add_candidates() {
    if (!indexed_) return;
    candidates_.clear();
    for (const auto& [priority, posted] : requests_) candidates_.push_back(key_of(*posted));
  }
  bool has_candidate() const { return !candidates_.empty(); }
  // The candidate that was added first; end(): the request is no longer in the queue.
  Position first_candidate() {
    const auto found = index_.find(candidates_.front());
    return found == index_.end() ? end() : found->second;
  }
  void drop_candidate() { candidates_.pop_front(); }

  // Where the last pass over the queue stopped; end(): the pass was complete.
  Position look() const { return look_; }
  void look_next(Position position) { look_ = position; }

 private:
  struct Hash {
    size_t operator()(const Key& key) const { return key.low; }
  };
  static Age age_of(const RequestState& posted) { return {posted.age, &posted}; }

  ByPriority requests_;
  ByAge ages_;
  bool indexed_ = false;
  std::unordered_map<Key, Position, Hash> index_;
  std::deque<Key> candidates_;
  std::set<uint64_t> sequences_;
  Position look_ = requests_.end();
};

}  // namespace mykv
