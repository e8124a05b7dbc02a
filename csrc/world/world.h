// The world: its ranks, their hosts, and the communicators and the segment that the ranks share. All ranks create it
// together, once, with plain MPI calls; after that only the runtime's thread calls MPI.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "memory/segment.h"
#include "table/entry.h"
#include "world/communicator.h"

namespace mykv {

// A host without MPI, whose ranks are threads of one process and share one mapping. So tools that are limited to
// one process, such as ThreadSanitizer, can observe all ranks.

// Memory for a host whose ranks are threads of this process. It must outlive their worlds.
class ThreadHost {
 public:
  // `region_bytes`: address space for the slots of one rank, a multiple of 4096.
  ThreadHost(int size, size_t region_bytes, size_t table_capacity = kEntries);

  int size() const { return size_; }
  size_t region_bytes() const { return region_bytes_; }
  const Segment& segment() const { return segment_; }

 private:
  int size_;
  size_t region_bytes_;
  Segment segment_;
};

class ThreadHost;

struct WorldOptions {
  // Ranks of one machine are split into this many groups that share no memory, as if they were hosts (for tests).
  int virtual_hosts = 1;
  // Names and versions that must be the same on all ranks; compared before anything else is exchanged.
  std::vector<std::pair<std::string, std::string>> versions;
  // The ranks' numbers in messages, if this world is part of a larger one; empty: their ranks.
  std::vector<int> labels;
  // Entries of a host's table. The host has at most this number of parts under way; further parts wait for a free
  // entry.
  size_t table_capacity = kEntries;
  // Address space, in bytes, that one host's segment may take.
  size_t most_address_space = size_t{1} << 43;  // 8 TiB of the 128 TiB that x86-64 processes have
};

class World {
 public:
  World(MPI_Comm parent, const WorldOptions& options);
  // A rank of a ThreadHost; it has no communicators, and its settings are not compared.
  World(const ThreadHost& host, int rank, const WorldOptions& options);
  World(const World&) = delete;
  World& operator=(const World&) = delete;
  ~World();

  int rank() const { return rank_; }
  int size() const { return size_; }
  int local_rank() const { return local_rank_; }
  int local_size() const { return static_cast<int>(hosts_[host_].size()); }
  int host() const { return host_; }
  // The ranks with this rank's local rank, one on each host: this rank's position among them, and their number.
  int cross_rank() const;
  int cross_size() const;
  // Global ranks on each host, ascending; hosts in the order of their first rank.
  const std::vector<std::vector<int>>& hosts() const { return hosts_; }
  bool has_several_hosts() const { return hosts_.size() > 1; }
  // The global ranks of this host.
  const std::vector<int>& host_ranks() const { return hosts_[static_cast<size_t>(host_)]; }
  int host_of(int rank) const { return host_of_[rank]; }
  // A rank's position among the ranks of its host.
  int local_rank_of(int rank) const;
  // Whether these ranks are a part of a larger world.
  bool is_subset() const { return !options_.labels.empty(); }
  // A rank's number in messages.
  int label(int rank) const { return options_.labels.empty() ? rank : options_.labels[static_cast<size_t>(rank)]; }
  std::vector<int> labels(const std::vector<int>& ranks) const;

  const Segment& segment() const { return segment_; }
  // Never frees the communicators, since freeing needs all their processes.
  void let_go();
  // This rank is sending and receiving no message in the communicators: the next world of these processes may reuse
  // them.
  void is_quiet() { quiet_ = true; }
  // Never unmaps the segment: MPI may still be writing to it.
  void keep_segment() { segment_.keep_forever(); }
  size_t table_bytes() const { return table_bytes_; }
  // Where this rank's region of the segment begins, and its size.
  size_t region_begin() const { return table_bytes_ + region_bytes_ * static_cast<size_t>(local_rank_); }
  size_t region_bytes() const { return region_bytes_; }

  MPI_Comm control() const { return control_.get(); }  // small messages between the hosts' first ranks
  MPI_Comm data() const { return data_.get(); }        // messages with slices
  int largest_tag() const { return largest_tag_; }

  // Throws Error on every rank unless all ranks pass the same value. Collective.
  void require_same(const char* what, uint64_t value) const;
  // `mine`: this rank's failure, or empty. Throws Error on all ranks if a rank has a failure. Collective.
  void throw_failures(const std::string& mine) const;
  // The text of each rank, cut after 1 KiB. Collective.
  std::vector<std::string> texts(const std::string& mine) const;
  // Why this rank shares no memory with the other ranks of its machine. Empty if only another container is the reason,
  // and on all but one rank of the machine.
  const std::string& why_memory_is_not_shared() const { return why_memory_is_not_shared_; }
  // The number of processes that asked for this rank's segment and were rejected.
  int rejected_callers() const { return rejected_callers_; }

 private:
  std::string meet_on_host(Communicator candidates);
  std::string form_host(const Communicator& group);
  void require_same_versions() const;
  void reuse_communicators();

  const WorldOptions options_;
  Communicator control_;
  Communicator data_;
  // The processes of this world, by their ranks in MPI_COMM_WORLD; empty if a process has no rank there.
  std::vector<int> processes_;
  uint64_t pair_number_ = 0;
  bool quiet_ = false;
  int largest_tag_ = 32767;  // the least that MPI guarantees
  int rank_ = 0;
  int size_ = 1;
  int local_rank_ = 0;
  int host_ = 0;
  std::vector<std::vector<int>> hosts_;
  std::vector<int> host_of_;
  Segment segment_;
  std::string why_memory_is_not_shared_;
  int rejected_callers_ = 0;
  size_t table_bytes_ = 0;
  size_t region_bytes_ = 0;
};

}  // namespace mykv
