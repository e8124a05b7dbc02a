#include "operations/tickets.h"

namespace mykv {

Ticket::Ticket(std::shared_ptr<Tickets> tickets, uint64_t number) : tickets_(std::move(tickets)), number_(number) {}

Ticket::~Ticket() { tickets_->end(number_); }

bool Ticket::within(uint64_t window) const {
  const uint64_t oldest = tickets_->oldest();
  return number_ == oldest || number_ < oldest + window;
}

std::shared_ptr<const Ticket> Tickets::take() {
  uint64_t number;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    number = oldest() + ended_.size();
    ended_.push_back(false);
  }
  return std::make_shared<const Ticket>(shared_from_this(), number);
}

void Tickets::end(uint64_t number) {
  if (fork_number() != forks_) return;  // in a fork the lock may never be free
  std::lock_guard<std::mutex> lock(mutex_);
  uint64_t oldest = oldest_.load(std::memory_order_relaxed);
  ended_[number - oldest] = true;
  while (!ended_.empty() && ended_.front()) {
    ended_.pop_front();
    ++oldest;
  }
  oldest_.store(oldest, std::memory_order_relaxed);
}

}  // namespace mykv
