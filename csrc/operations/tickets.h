// The order in which a rank's operations were asked for, and the oldest operation that has not ended. Operations begin
// in another order: MXNet's engine runs what is ready first, and priorities count.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>

#include "base/forks.h"

namespace mykv {

class Tickets;

// The number of one operation in that order. The operation has ended when its ticket is destroyed.
class Ticket {
 public:
  Ticket(std::shared_ptr<Tickets> tickets, uint64_t number);
  ~Ticket();
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;

  uint64_t number() const { return number_; }
  // Whether this ticket is the oldest that has not ended, or one of the `window` tickets from the oldest on.
  bool within(uint64_t window) const;

 private:
  const std::shared_ptr<Tickets> tickets_;
  const uint64_t number_;
};

// Thread-safe.
class Tickets : public std::enable_shared_from_this<Tickets> {
 public:
  std::shared_ptr<const Ticket> take();
  // The number of the oldest ticket that has not ended; without one, the number of the next ticket.
  uint64_t oldest() const { return oldest_.load(std::memory_order_relaxed); }

 private:
  friend class Ticket;
  void end(uint64_t number);

  const uint32_t forks_ = fork_number();
  std::mutex mutex_;
  std::deque<bool> ended_;  // from oldest_ on
  std::atomic<uint64_t> oldest_{0};
};

}  // namespace mykv
