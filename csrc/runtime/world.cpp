#include "runtime/world.h"

#include <unistd.h>

#include <algorithm>

#include "runtime/error.h"
#include "runtime/rendezvous.h"
#include "transport/host/handover.h"

namespace mykv {

namespace {

void check(int code, const char* what) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw Error(std::string("MPI failed in ") + what + ": " + std::string(text, static_cast<size_t>(length)));
}

Communicator duplicate(MPI_Comm comm) {
  MPI_Comm copy;
  check(MPI_Comm_dup(comm, &copy), "MPI_Comm_dup");
  MPI_Comm_set_errhandler(copy, MPI_ERRORS_RETURN);
  return Communicator(copy);
}

Communicator split(MPI_Comm comm, int color, int key) {
  MPI_Comm part;
  check(MPI_Comm_split(comm, color, key, &part), "MPI_Comm_split");
  return Communicator(part);
}

// Address space for the slots of one rank: as much as the machine has memory, within what a process can map.
size_t region_bytes_for(int local_size) {
  constexpr size_t kMostAddressSpace = size_t{1} << 43;  // 8 TiB of the 128 TiB that x86-64 processes have
  constexpr size_t kStep = size_t{1} << 21;              // regions start on a huge page
  const size_t memory = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return std::min(memory, kMostAddressSpace / static_cast<size_t>(local_size)) / kStep * kStep;
}

Communicator split_by_host(MPI_Comm comm, int rank, int virtual_hosts) {
  MPI_Comm part;
  check(MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &part), "MPI_Comm_split_type");
  Communicator machine(part);
  if (virtual_hosts <= 1) return machine;
  return split(machine.get(), machine.rank() * virtual_hosts / machine.size(), rank);
}

}  // namespace

Communicator::~Communicator() {
  if (comm_ == MPI_COMM_NULL) return;
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (!finalized) MPI_Comm_free(&comm_);
}

int Communicator::rank() const {
  int rank = 0;
  MPI_Comm_rank(comm_, &rank);
  return rank;
}

int Communicator::size() const {
  int size = 1;
  MPI_Comm_size(comm_, &size);
  return size;
}

World::World(MPI_Comm parent, const WorldOptions& options) : control_(duplicate(parent)), data_(duplicate(parent)) {
  rank_ = control_.rank();
  size_ = control_.size();
  meet_on_host(split_by_host(control_.get(), rank_, options.virtual_hosts));

  // Everyone learns everyone's host, named by the global rank of its first rank.
  std::vector<int> leaders(static_cast<size_t>(size_));
  const int leader = hosts_[0][0];
  check(MPI_Allgather(&leader, 1, MPI_INT, leaders.data(), 1, MPI_INT, control_.get()), "MPI_Allgather");
  hosts_.clear();
  host_of_.resize(static_cast<size_t>(size_));
  for (int r = 0; r < size_; ++r) {
    const auto same = std::find_if(hosts_.begin(), hosts_.end(), [&](const std::vector<int>& ranks) { return ranks[0] == leaders[r]; });
    host_of_[r] = static_cast<int>(same - hosts_.begin());
    if (same == hosts_.end()) {
      hosts_.push_back({r});
    } else {
      same->push_back(r);
    }
  }
  host_ = host_of_[rank_];
}

int World::cross_rank() const {
  int rank = 0;
  for (int h = 0; h < host_; ++h) rank += static_cast<int>(hosts_[static_cast<size_t>(h)].size()) > local_rank_;
  return rank;
}

int World::cross_size() const {
  int size = 0;
  for (const std::vector<int>& ranks : hosts_) size += static_cast<int>(ranks.size()) > local_rank_;
  return size;
}

// Ranks that MPI places on one machine may still be unable to share memory (two containers). So the first candidate
// offers its segment, those who get it stay together, and the others meet anew among themselves.
void World::meet_on_host(Communicator candidates) {
  for (;;) {
    const int local_size = candidates.size();
    table_bytes_ = (Rendezvous::bytes(local_size) + 4095) / 4096 * 4096;
    region_bytes_ = region_bytes_for(local_size);
    if (candidates.rank() == 0) {
      segment_ = Segment::create(table_bytes_ + region_bytes_ * static_cast<size_t>(local_size));
      segment_.commit(0, 4096);
    }
    const bool joined = hand_over(candidates.get(), &segment_);
    std::vector<int> all(static_cast<size_t>(local_size));
    const int mine = joined;
    check(MPI_Allgather(&mine, 1, MPI_INT, all.data(), 1, MPI_INT, candidates.get()), "MPI_Allgather");
    Communicator group = split(candidates.get(), joined ? 0 : 1, candidates.rank());
    if (!joined) {
      candidates = std::move(group);
      continue;
    }
    local_rank_ = group.rank();
    std::vector<int> ranks(static_cast<size_t>(group.size()));
    check(MPI_Allgather(&rank_, 1, MPI_INT, ranks.data(), 1, MPI_INT, group.get()), "MPI_Allgather");
    hosts_ = {ranks};
    // The table's layout follows the number of ranks that really share it.
    table_bytes_ = (Rendezvous::bytes(group.size()) + 4095) / 4096 * 4096;
    // The first rank fills the table's head in before anybody uses it.
    if (local_rank_ == 0) Rendezvous(segment_.base(), ranks, 0, true, false);
    check(MPI_Barrier(group.get()), "MPI_Barrier");
    return;
  }
}

}  // namespace mykv
