#include "runtime/tickets.h"

#include <algorithm>

namespace mykv {

Ticket::Ticket(std::shared_ptr<Tickets> tickets, uint64_t number, uint64_t operations)
    : tickets_(std::move(tickets)), number_(number), operations_(operations) {}

Ticket::~Ticket() { tickets_->end(number_, operations_); }

bool Ticket::within(uint64_t window) const {
  const uint64_t oldest = tickets_->oldest();
  return number_ == oldest || number_ + operations_ <= oldest + window;
}

std::shared_ptr<const Ticket> Tickets::take(uint64_t operations) {
  operations = std::max<uint64_t>(operations, 1);
  uint64_t number;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    number = oldest() + ended_.size();
    ended_.insert(ended_.end(), operations, false);
  }
  return std::make_shared<const Ticket>(shared_from_this(), number, operations);
}

void Tickets::end(uint64_t number, uint64_t operations) {
  std::lock_guard<std::mutex> lock(mutex_);
  uint64_t oldest = oldest_.load(std::memory_order_relaxed);
  const auto first = ended_.begin() + static_cast<std::ptrdiff_t>(number - oldest);
  std::fill(first, first + static_cast<std::ptrdiff_t>(operations), true);
  while (!ended_.empty() && ended_.front()) {
    ended_.pop_front();
    ++oldest;
  }
  oldest_.store(oldest, std::memory_order_relaxed);
}

}  // namespace mykv
