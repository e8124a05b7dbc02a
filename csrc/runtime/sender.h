// Chooses which part of this rank's requests goes to the host's table next.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/device_parts.h"
#include "runtime/parts.h"
#include "runtime/requests.h"
#include "runtime/send_queue.h"
#include "table/host_table.h"

namespace mykv {

// Used by the runtime's thread only.
class Sender {
 public:
  Sender(HostTable& table, Requests& requests, SendQueue& queue, Parts& parts, DeviceParts& device_parts)
      : table_(table), requests_(requests), queue_(queue), parts_(parts), device_parts_(device_parts) {}

  // Moves posted requests to the queue. Returns whether there were any.
  bool take_posted();
  // Sends the first part that can be sent, by priority. Returns whether there may be more. While the host's table is
  // full, a part can be sent if another rank has made its entry, if its request is among the oldest (entries are
  // reserved for them), or once entries are freed. Each call tries a few requests from where the last call stopped:
  // trying all of them for each part would be quadratic.
  bool start_part();
  // After start_part(): whether some request waits only for room.
  bool blocked() const { return blocked_; }
  // After start_part(): whether some request waits for work in its caller's stream.
  bool gated() const { return gated_; }

  // Functions for the end of the runtime.

  // The requests that have parts to send.
  void add_requests(std::vector<std::shared_ptr<RequestState>>* to) const;
  void drop() { queue_.clear(); }

 private:
  enum class Start { sent, not_yet, no_room, no_entry };
  Start start_next(SendQueue::Position position, bool room);
  bool start_candidate(bool room);
  bool start_oldest(bool room);
  bool send(const std::shared_ptr<RequestState>& posted, size_t number, std::string refusal);
  void subscribe();
  void unsubscribe();

  HostTable& table_;
  Requests& requests_;
  SendQueue& queue_;
  Parts& parts_;
  DeviceParts& device_parts_;
  bool blocked_ = false;
  bool gated_ = false;
};

}  // namespace mykv
