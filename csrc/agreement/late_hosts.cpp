#include "agreement/late_hosts.h"

#include <algorithm>

namespace mykv {

void LateHosts::announced(HostsMeeting* meeting, const Message& message, size_t part, int64_t now) const {
  const bool counts = tree_.includes(part, message.late_rank);
  meeting->last = counts ? message.late_rank : -1;
  if (!counts) return;
  if (meeting->first == 0) meeting->first = now;
  meeting->later += static_cast<int64_t>(tree_.ranks_of(part)) * (now - meeting->first);
  meeting->waited += message.waited_ns;
}

int64_t LateHosts::waited(const HostsMeeting& meeting, int64_t now) const {
  return static_cast<int64_t>(tree_.all_ranks()) * (now - meeting.first) - meeting.later + meeting.waited;
}

void LateHosts::complete(const HostsMeeting& meeting, int64_t now) {
  if (meeting.last < 0) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  of_[meeting.last].add(waited(meeting, now) / std::max<int64_t>(world_.size() - 1, 1), meeting.ends_step);
}

std::vector<LateRank> LateHosts::ranks() {
  std::vector<LateRank> late;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [rank, lateness] : of_) late.emplace_back(world_.label(rank), lateness);
  return late;
}

}  // namespace mykv
