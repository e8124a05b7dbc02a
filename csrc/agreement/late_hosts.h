// For the statistics of rank 0: which rank came last to the operations of several hosts, and how long the others waited
// for it. The hosts' announcements say which of their ranks came last; rank 0's clock says which announcement did.
#pragma once

#include <map>
#include <mutex>
#include <vector>

#include "agreement/host_tree.h"
#include "agreement/messages.h"
#include "table/entry.h"
#include "world/world.h"

namespace mykv {

// How far the hosts are with one operation, as this rank sees it; a part is one host, or a host with all hosts below
// it.
struct HostsMeeting {
  int64_t first = 0;   // when the first part announced; now_ns()
  int64_t later = 0;   // sum over ranks: how long after `first` their part announced
  int64_t waited = 0;  // sum over ranks: how long they waited for the last rank of their part
  int last = -1;       // the rank that came last in the part that announced last
  bool ends_step = false;
};

// Thread-safe.
class LateHosts {
 public:
  LateHosts(const World& world, const HostTree& tree) : world_(world), tree_(tree) {}

  // A part has announced the operation. Changes `meeting` only.
  void announced(HostsMeeting* meeting, const Message& message, size_t part, int64_t now) const;
  // The announcement at this time was the last one: sum over the ranks of all parts of how long they waited.
  int64_t waited(const HostsMeeting& meeting, int64_t now) const;
  // Counts a complete meeting of all hosts.
  void complete(const HostsMeeting& meeting, int64_t now);
  std::vector<LateRank> ranks();

 private:
  const World& world_;
  const HostTree& tree_;
  std::mutex mutex_;
  std::map<int, Lateness> of_;  // by rank
};

}  // namespace mykv
