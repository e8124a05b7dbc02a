// For the statistics of rank 0: which rank came last to the operations of several hosts, and how long the others waited
// for it. The hosts' announcements say which of their ranks came last; rank 0's clock says which announcement did.
#pragma once

#include <map>
#include <mutex>
#include <vector>

#include "agreement/messages.h"
#include "table/lateness.h"
#include "world/world.h"

namespace mykv {

// How far the hosts are with one operation; rank 0's own.
struct HostsMeeting {
  int64_t first = 0;   // when the first host announced; now_ns()
  int64_t later = 0;   // sum over ranks: how long after `first` their host announced
  int64_t waited = 0;  // sum over ranks: how long they waited for the last rank of their host
  int last = -1;       // the rank that came last on the host that announced last
  bool ends_step = false;
};

// Thread-safe.
class LateHosts {
 public:
  explicit LateHosts(const World& world) : world_(world) {}

  // The host of rank `from` has announced the operation. Changes `meeting` only.
  void announced(HostsMeeting* meeting, const Message& message, int from, int64_t now) const;
  // The announcement at this time was the last one.
  void complete(const HostsMeeting& meeting, int64_t now);
  std::vector<LateRank> ranks();

 private:
  const World& world_;
  std::mutex mutex_;
  std::map<int, Lateness> of_;  // by rank
};

}  // namespace mykv
