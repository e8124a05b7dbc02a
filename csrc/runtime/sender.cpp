#include "runtime/sender.h"

#include <string>
#include <utility>

namespace mykv {

namespace {

// In one call, when the host's table is full:
constexpr int kLooks = 32;  // requests to look at, for entries that other ranks have made
constexpr int kOldest = 8;  // oldest requests to look at that find no entry

}  // namespace

bool Sender::take_posted() {
  const auto taken = requests_.take_posted();
  for (const auto& posted : taken) queue_.add(posted);
  return !taken.empty();
}

bool Sender::start_part() {
  blocked_ = gated_ = false;
  if (queue_.empty()) {
    if (queue_.is_subscribed()) unsubscribe();
    return false;
  }
  const bool room = requests_.has_room();
  if (queue_.is_subscribed() && (start_candidate(room) || start_oldest(room))) return true;
  int looks = kLooks;
  for (auto it = queue_.begin(); it != queue_.end();) {
    const auto here = it++;
    switch (start_next(here, room)) {
      case Start::sent:
        return true;
      case Start::not_yet:
        continue;
      case Start::no_room:
        blocked_ = true;
        return false;
      case Start::no_entry:
        if (!queue_.is_subscribed()) subscribe();
        if (!std::exchange(blocked_, true) && queue_.look() != queue_.end()) it = queue_.look();
        queue_.look_next(it);
        if (--looks == 0) return false;
    }
  }
  if (blocked_) queue_.look_next(queue_.end());
  return false;
}

void Sender::subscribe() {
  table_.subscribe_to_new_entries(true);
  queue_.subscribe();
}

void Sender::unsubscribe() {
  table_.subscribe_to_new_entries(false);
  queue_.unsubscribe();
}

// True if a part was sent or there is more to look at.
bool Sender::start_candidate(bool room) {
  for (int looks = kLooks; queue_.has_candidate() && looks > 0; --looks) {
    const SendQueue::Position position = queue_.first_candidate();
    const Start start = position == queue_.end() ? Start::not_yet : start_next(position, room);
    if (start == Start::no_room) return false;
    if (start == Start::sent) return true;  // the key stays, since the request may have more parts
    queue_.drop_candidate();
  }
  return queue_.has_candidate();
}

bool Sender::start_oldest(bool room) {
  int looks = kLooks, refused = kOldest;
  for (auto it = queue_.by_age().begin(); it != queue_.by_age().end() && looks > 0 && refused > 0; ++it, --looks) {
    const Start start = start_next(it->second, room);
    if (start == Start::sent) return true;
    refused -= start == Start::no_entry;
  }
  return false;
}

// Sends the next part of a request, or drops the request if there is none.
Sender::Start Sender::start_next(SendQueue::Position position, bool room) {
  const std::shared_ptr<RequestState> posted = position->second;
  const Request& request = posted->request;
  if (request.operation.road == DataPath::staged && DeviceParts::awaits_device(*posted)) {
    gated_ = true;
    return Start::not_yet;
  }
  size_t number = 0;
  std::string refusal;
  switch (requests_.take_next(*posted, room, &number, &refusal)) {
    case Requests::Next::none:
      queue_.erase(position);
      return Start::sent;
    case Requests::Next::not_yet:
      return Start::not_yet;
    case Requests::Next::no_room:
      return Start::no_room;
    case Requests::Next::part:
      break;
  }
  // Checked before the share is copied.
  const bool no_entry = (queue_.is_subscribed() || requests_.is_crowded_out()) &&
                        !table_.can_arrive(make_key(request.name, request.turn, number), parts_.due(*posted, number));
  if (!no_entry && send(posted, number, std::move(refusal))) {
    requests_.set_crowded_out(nullptr);
    if (number + 1 == posted->parts) queue_.erase(position);
    return Start::sent;
  }
  requests_.set_crowded_out(posted.get());
  requests_.put_back(*posted);
  return Start::no_entry;
}

bool Sender::send(const std::shared_ptr<RequestState>& posted, size_t number, std::string refusal) {
  if (posted->request.operation.road != DataPath::staged || !refusal.empty()) {
    return parts_.send(posted, number, std::move(refusal), false);
  }
  device_parts_.begin(Parts::make(posted, number));
  return true;
}

void Sender::add_requests(std::vector<std::shared_ptr<RequestState>>* to) const {
  for (const auto& [priority, posted] : queue_) to->push_back(posted);
}

}  // namespace mykv
