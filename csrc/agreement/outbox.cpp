#include "agreement/outbox.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "base/keep_forever.h"
#include "base/mpi_check.h"

namespace mykv {

namespace {

constexpr int64_t kHoldNs = 200000;  // about two round trips between hosts

}  // namespace

Outbox::~Outbox() {
  // MPI may still read messages that are being sent; their memory is never freed.
  if (!sending_.empty()) keep_for_good(std::move(sending_));
}

void Outbox::up(const Message& message, bool may_wait) {
  if (up_.empty() && may_wait) held_since_ = now_ns();
  held_ = may_wait && (up_.empty() || held_ > 0) ? held_ + 1 : 0;
  encode(message, &up_);
}

void Outbox::down(const Message& message) {
  if (!tree_.children().empty()) encode(message, &down_);
}

void Outbox::to_rank_0(const Message& message) { encode(message, &direct_); }

void Outbox::past_children(const Message& message) {
  send_ready(false);
  const auto bytes = std::make_shared<std::vector<char>>();
  encode(message, bytes.get());
  const std::vector<int>& children = tree_.children();
  for (const std::vector<int>& ranks : world_.hosts()) {
    const int to = ranks[0];
    if (to != world_.rank() && std::find(children.begin(), children.end(), to) == children.end()) send(bytes, to);
  }
}

bool Outbox::send_ready(bool may_hold) {
  for (auto it = sending_.begin(); it != sending_.end();) {
    int ended = 0;
    check_mpi(MPI_Test(&it->request, &ended, MPI_STATUS_IGNORE), "MPI_Test between hosts");
    it = ended ? sending_.erase(it) : std::next(it);
  }
  bool sent = false;
  if (!up_.empty() && !(may_hold && holds())) {
    held_ = 0;
    send(std::make_shared<std::vector<char>>(std::exchange(up_, {})), tree_.parent());
    sent = true;
  }
  if (!down_.empty()) {
    const auto bytes = std::make_shared<std::vector<char>>(std::exchange(down_, {}));
    for (const int child : tree_.children()) send(bytes, child);
    sent = true;
  }
  if (!direct_.empty()) {
    send(std::make_shared<std::vector<char>>(std::exchange(direct_, {})), 0);
    sent = true;
  }
  return sent;
}

bool Outbox::holds() const { return held_ > 0 && now_ns() - held_since_ < kHoldNs; }

void Outbox::send(std::shared_ptr<const std::vector<char>> bytes, int to) {
  traffic_.add(bytes->size());
  sending_.push_back({std::move(bytes), MPI_REQUEST_NULL});
  Sending& s = sending_.back();
  check_mpi(
      MPI_Isend(s.bytes->data(), static_cast<int>(s.bytes->size()), MPI_BYTE, to, tag_, world_.control(), &s.request),
      "MPI_Isend between hosts");
}

}  // namespace mykv
