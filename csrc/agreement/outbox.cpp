#include "agreement/outbox.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/clock.h"
#include "base/forks.h"
#include "base/mpi_check.h"

namespace mykv {

Sendings::~Sendings() {
  // MPI may still read messages that are being sent; their memory is never freed.
  if (!all_.empty()) keep_forever(std::move(all_));
}

void Sendings::send(Bytes bytes, int to, int tag) {
  all_.push_back({std::move(bytes), MPI_REQUEST_NULL});
  Sending& s = all_.back();
  check_mpi(MPI_Isend(s.bytes->data(), static_cast<int>(s.bytes->size()), MPI_BYTE, to, tag, comm_, &s.request),
            "MPI_Isend between hosts");
}

void Sendings::progress() {
  for (auto it = all_.begin(); it != all_.end();) {
    int ended = 0;
    check_mpi(MPI_Test(&it->request, &ended, MPI_STATUS_IGNORE), "MPI_Test between hosts");
    it = ended ? all_.erase(it) : std::next(it);
  }
}

namespace {

constexpr int64_t kHoldNs = 200000;  // about two round trips between hosts

}  // namespace

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
  sendings_.progress();
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

void Outbox::send(Sendings::Bytes bytes, int to) {
  traffic_.add(bytes->size());
  sendings_.send(std::move(bytes), to, tag_);
}

}  // namespace mykv
