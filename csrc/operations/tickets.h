// The order in which a rank's operations were asked for, and how far those that have not ended reach. They begin in
// another order: an engine runs first what waits for no other, and priorities count.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>

namespace mykv {

class Tickets;

// Of one operation, which has ended when it is destroyed.
class Ticket {
 public:
  Ticket(std::shared_ptr<Tickets> tickets, uint64_t number);
  ~Ticket();
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;

  uint64_t number() const { return number_; }
  // Whether it is the oldest that has not ended, or among the `window` that begin with that.
  bool within(uint64_t window) const;

 private:
  const std::shared_ptr<Tickets> tickets_;
  const uint64_t number_;
};

// Any thread.
class Tickets : public std::enable_shared_from_this<Tickets> {
 public:
  std::shared_ptr<const Ticket> take();
  // The number of the oldest that has not ended, or of the next one to be taken.
  uint64_t oldest() const { return oldest_.load(std::memory_order_relaxed); }

 private:
  friend class Ticket;
  void end(uint64_t number);

  const pid_t process_ = getpid();
  std::mutex mutex_;
  std::deque<bool> ended_;  // from oldest_ on
  std::atomic<uint64_t> oldest_{0};
};

}  // namespace mykv
