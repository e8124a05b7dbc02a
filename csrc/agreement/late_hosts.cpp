#include "agreement/late_hosts.h"

#include <algorithm>

namespace mykv {

void LateHosts::announced(HostsMeeting* meeting, const Message& message, int from, int64_t now) const {
  const bool counts = message.late_rank >= 0 && message.late_rank < world_.size() &&
                      world_.host_of(message.late_rank) == world_.host_of(from);
  meeting->last = counts ? message.late_rank : -1;
  if (!counts) return;
  if (meeting->first == 0) meeting->first = now;
  const auto ranks = static_cast<int64_t>(world_.hosts()[static_cast<size_t>(world_.host_of(from))].size());
  meeting->later += ranks * (now - meeting->first);
  meeting->waited += message.waited_ns;
}

void LateHosts::complete(const HostsMeeting& meeting, int64_t now) {
  if (meeting.last < 0) return;
  const auto all = static_cast<int64_t>(world_.size());
  const int64_t waited = all * (now - meeting.first) - meeting.later + meeting.waited;
  const std::lock_guard<std::mutex> lock(mutex_);
  of_[meeting.last].add(waited / std::max<int64_t>(all - 1, 1), meeting.ends_step);
}

std::vector<LateRank> LateHosts::ranks() {
  std::vector<LateRank> late;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [rank, lateness] : of_) late.emplace_back(world_.label(rank), lateness);
  return late;
}

}  // namespace mykv
