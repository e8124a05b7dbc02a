#include "agreement/host_tree.h"

#include <algorithm>

#include "base/error.h"

namespace mykv {

HostTree::HostTree(const World& world, size_t fan_out)
    : world_(world),
      fan_out_(std::max<size_t>(fan_out, 1)),
      host_(static_cast<size_t>(world.host())),
      parent_(world.hosts()[host_ == 0 ? 0 : parent_of(host_)][0]) {
  const std::vector<std::vector<int>>& hosts = world.hosts();
  // Goes from the last host to the first, since a host's children have higher numbers.
  std::vector<size_t> below(hosts.size());
  for (size_t host = hosts.size(); host-- > 0;) {
    below[host] += hosts[host].size();
    if (host > 0) below[parent_of(host)] += below[host];
  }
  all_ranks_ = below[host_];
  ranks_.push_back(hosts[host_].size());
  for (size_t child = host_ * fan_out_ + 1; child < hosts.size() && child <= (host_ + 1) * fan_out_; ++child) {
    children_.push_back(hosts[child][0]);
    ranks_.push_back(below[child]);
  }
}

size_t HostTree::branch_of(int from) const {
  if (from == world_.hosts()[host_][0]) return 0;
  const auto child = std::find(children_.begin(), children_.end(), from);
  if (child == children_.end()) throw Error("mykv received a message from an unexpected rank (different versions?)");
  return 1 + static_cast<size_t>(child - children_.begin());
}

bool HostTree::includes(size_t branch, int rank) const {
  if (rank < 0 || rank >= world_.size()) return false;
  auto host = static_cast<size_t>(world_.host_of(rank));
  if (branch == 0) return host == host_;
  const size_t child = host_ * fan_out_ + branch;
  while (host > child) host = parent_of(host);
  return host == child;
}

}  // namespace mykv
