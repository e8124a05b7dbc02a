// The tree through which the hosts' first ranks pass on announcements and verdicts. It limits how many hosts a rank
// exchanges messages with: one parent, and up to fan_out children. The host of rank 0 is the root. If there are at most
// fan_out + 1 hosts, all other hosts are its children.
#pragma once

#include <cstddef>
#include <vector>

#include "world/world.h"

namespace mykv {

class HostTree {
 public:
  HostTree(const World& world, size_t fan_out);

  bool is_root() const { return host_ == 0; }
  // parent(): the first rank of the host above; at the root, this rank itself. children(): the first ranks of the hosts
  // below.
  int parent() const { return parent_; }
  const std::vector<int>& children() const { return children_; }
  // Whether some hosts are not children of the root.
  bool is_deep() const { return world_.hosts().size() > fan_out_ + 1; }
  // The number of sources of announcements: this host, and each child, which speaks for all hosts below it.
  size_t branches() const { return 1 + children_.size(); }
  // The position of a branch in the order in which values are combined: this host first. Throws Error if `from` is
  // neither this rank nor a child.
  size_t branch_of(int from) const;
  // The number of ranks that a branch speaks for, and whether `rank` is one of them.
  size_t ranks_of(size_t branch) const { return ranks_[branch]; }
  bool includes(size_t branch, int rank) const;
  // The number of ranks that this host speaks for.
  size_t all_ranks() const { return all_ranks_; }

 private:
  size_t parent_of(size_t host) const { return (host - 1) / fan_out_; }

  const World& world_;
  const size_t fan_out_;
  const size_t host_;
  int parent_;
  std::vector<int> children_;
  std::vector<size_t> ranks_;  // number of ranks of each branch
  size_t all_ranks_ = 0;
};

}  // namespace mykv
