#include "world/world.h"

#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/mpi_check.h"
#include "base/text.h"
#include "operations/operation.h"
#include "table/host_table.h"
#include "world/communicator.h"
#include "world/segment_handover.h"

namespace mykv {

ThreadHost::ThreadHost(int size, size_t region_bytes, size_t table_capacity)
    : size_(size), region_bytes_(region_bytes) {
  std::string refused;
  segment_ = Segment::create(HostTable::bytes(size) + region_bytes * static_cast<size_t>(size), &refused);
  std::vector<int> ranks;
  for (int r = 0; r < size; ++r) ranks.push_back(r);
  HostTable(segment_, ranks, 0, table_capacity, false);
}

namespace {

// Sleeps between polls: ranks may arrive minutes apart (a rank compiles, or loads data), and most MPIs spin while they
// wait.
MPI_Comm wait_for_all(MPI_Comm comm) {
  constexpr int kLongestUs = 2000;
  MPI_Request request;
  check_mpi(MPI_Ibarrier(comm, &request), "MPI_Ibarrier");
  for (int us = 1;; us = std::min(2 * us, kLongestUs)) {
    int done = 0;
    check_mpi(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    if (done) return comm;
    usleep(static_cast<useconds_t>(us));
  }
}

Communicator split(MPI_Comm comm, int color, int key) {
  MPI_Comm part;
  check_mpi(MPI_Comm_split(comm, color, key, &part), "MPI_Comm_split");
  return Communicator(part);
}

constexpr size_t kRegionStep = size_t{1} << 21;  // regions start on a huge page

// Address space for the slots of one rank: the size of the machine's memory, limited by the address space of a process,
// and by the largest file that this process can create.
size_t region_bytes_for(int local_size, size_t table, size_t most_address_space) {
  const auto ranks = static_cast<size_t>(local_size);
  const size_t memory = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t room = std::max(Segment::largest(), table) - table;
  return std::max(std::min({memory, most_address_space / ranks, room / ranks}) / kRegionStep, size_t{1}) * kRegionStep;
}

Communicator split_by_host(MPI_Comm comm, int rank, int virtual_hosts) {
  MPI_Comm part;
  check_mpi(MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &part), "MPI_Comm_split_type");
  Communicator machine(part);
  if (virtual_hosts <= 1) return machine;
  return split(machine.get(), machine.rank() * virtual_hosts / machine.size(), rank);
}

}  // namespace

World::World(MPI_Comm parent, const WorldOptions& options)
    : options_(options),
      control_(Communicator::duplicate(wait_for_all(parent))),
      data_(Communicator::duplicate(parent)) {
  rank_ = control_.rank();
  size_ = control_.size();
  require_same_versions();
  reuse_communicators();
  int* largest_tag = nullptr;
  int known = 0;
  MPI_Comm_get_attr(data_.get(), MPI_TAG_UB, &largest_tag, &known);
  if (known) largest_tag_ = *largest_tag;
  require_same("the number of virtual hosts (MYKV_VIRTUAL_HOSTS)", static_cast<uint64_t>(options.virtual_hosts));
  throw_failures(meet_on_host(split_by_host(control_.get(), rank_, options.virtual_hosts)));

  // Every rank learns the host of every rank, named by the global rank of the host's first rank.
  std::vector<int> leaders(static_cast<size_t>(size_));
  const int leader = hosts_[0][0];
  check_mpi(MPI_Allgather(&leader, 1, MPI_INT, leaders.data(), 1, MPI_INT, control_.get()), "MPI_Allgather");
  hosts_.clear();
  host_of_.resize(static_cast<size_t>(size_));
  for (int r = 0; r < size_; ++r) {
    const auto same = std::find_if(hosts_.begin(), hosts_.end(),
                                   [&](const std::vector<int>& ranks) { return ranks[0] == leaders[r]; });
    host_of_[r] = static_cast<int>(same - hosts_.begin());
    if (same == hosts_.end()) {
      hosts_.push_back({r});
    } else {
      same->push_back(r);
    }
  }
  host_ = host_of_[rank_];
}

World::World(const ThreadHost& host, int rank, const WorldOptions& options)
    : options_(options), rank_(rank), size_(host.size()), local_rank_(rank) {
  hosts_.emplace_back();
  for (int r = 0; r < size_; ++r) hosts_[0].push_back(r);
  host_of_.assign(static_cast<size_t>(size_), 0);
  segment_ = Segment::borrow(host.segment());
  table_bytes_ = HostTable::bytes(size_);
  region_bytes_ = host.region_bytes();
}

void World::require_same(const char* what, uint64_t value) const {
  if (control_.get() == MPI_COMM_NULL) return;
  std::vector<uint64_t> values(static_cast<size_t>(size_));
  check_mpi(MPI_Allgather(&value, 1, MPI_UINT64_T, values.data(), 1, MPI_UINT64_T, control_.get()), "MPI_Allgather");
  for (int r = 1; r < size_; ++r) {
    if (values[static_cast<size_t>(r)] == values[0]) continue;
    throw AgreedError(std::string("mykv needs the same settings on all ranks, but ") + what + " is " +
                      std::to_string(values[0]) + " on rank " + std::to_string(label(0)) + " and " +
                      std::to_string(values[static_cast<size_t>(r)]) + " on rank " + std::to_string(label(r)) +
                      ". Give the setting one value on all ranks");
  }
}

// Ranks of other versions may exchange other messages, so this comparison comes first, and its form must never change.
void World::require_same_versions() const {
  uint64_t hash = 0;
  std::string mine;
  for (const auto& [name, version] : options_.versions) {
    mine += (mine.empty() ? "" : ", ") + name + " " + version;
    hash = hash_bytes(mine.data(), mine.size(), hash);
  }
  std::vector<uint64_t> hashes(static_cast<size_t>(size_));
  check_mpi(MPI_Allgather(&hash, 1, MPI_UINT64_T, hashes.data(), 1, MPI_UINT64_T, control_.get()), "MPI_Allgather");
  const auto other = std::find_if(hashes.begin(), hashes.end(), [&](uint64_t one) { return one != hashes[0]; });
  if (other == hashes.end()) return;
  constexpr size_t kBytes = 256;
  const auto who = static_cast<size_t>(other - hashes.begin());
  std::string texts[2];
  for (const size_t root : {size_t{0}, who}) {
    char text[kBytes] = {};
    set_text(text, kBytes, mine);
    check_mpi(MPI_Bcast(text, kBytes, MPI_CHAR, static_cast<int>(root), control_.get()), "MPI_Bcast");
    texts[root != 0] = text;
  }
  throw AgreedError("mykv needs the same versions on all ranks, but rank " + std::to_string(label(0)) + " has " +
                    texts[0] + " and rank " + std::to_string(label(static_cast<int>(who))) + " has " + texts[1] +
                    ". Install the same versions on all hosts");
}

std::vector<int> World::labels(const std::vector<int>& ranks) const {
  std::vector<int> result;
  for (int rank : ranks) result.push_back(label(rank));
  return result;
}

// Takes the communicators of an earlier world of the same processes, if that world had several hosts and has ended on
// all of them.
void World::reuse_communicators() {
  processes_ = processes_of(control_.get());
  if (processes_.empty()) return;
  const CommunicatorPair pair = take_communicators(control_.get(), processes_);
  pair_number_ = pair.number;
  if (pair.control == MPI_COMM_NULL) return;
  control_ = Communicator(pair.control);  // assigning frees the previous communicator
  data_ = Communicator(pair.data);
}

// Never frees the communicators of several hosts: ranks leave at different times, so messages to a rank that left may
// be under way, even after shutdown() on all ranks.
World::~World() {
  if (hosts_.size() == 1) return;
  if (quiet_ && !processes_.empty() && control_.get() != MPI_COMM_NULL)
    give_back_communicators(processes_, {pair_number_, control_.get(), data_.get()});
  let_go();
}

void World::let_go() {
  control_.let_go();
  data_.let_go();
}

int World::local_rank_of(int rank) const {
  const std::vector<int>& ranks = hosts_[static_cast<size_t>(host_of(rank))];
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
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
// offers its segment, and the ranks that get it form a host. The other ranks repeat this among themselves. Returns this
// rank's failure. If a rank fails, all ranks of its group return, so that no rank waits for it.
std::string World::meet_on_host(Communicator candidates) {
  for (bool first = true;; first = false) {
    Communicator group;  // freed after the meeting
    const RevokeOnDeath meeting(candidates.get());
    const int local_size = candidates.size();
    const auto ranks = static_cast<size_t>(local_size);
    const size_t table = HostTable::bytes(local_size);
    const size_t bytes = table + region_bytes_for(local_size, table, options_.most_address_space) * ranks;
    const Handover mine = hand_over(candidates.get(), bytes, &segment_);
    if (mine.bytes > 0) region_bytes_ = (mine.bytes - table) / ranks;
    if (first && candidates.size() > 1) why_memory_is_not_shared_ = mine.why_memory_is_not_shared;
    rejected_callers_ += mine.rejected_callers;
    std::vector<int> results(static_cast<size_t>(local_size));
    const int result = static_cast<int>(mine.result);
    check_mpi(MPI_Allgather(&result, 1, MPI_INT, results.data(), 1, MPI_INT, candidates.get()), "MPI_Allgather");
    const int failed = static_cast<int>(Handover::Result::failed);
    if (std::find(results.begin(), results.end(), failed) != results.end()) return mine.failure;
    const bool joined = mine.result == Handover::Result::joined;
    group = split(candidates.get(), joined ? 0 : 1, candidates.rank());
    if (joined) return form_host(group);
    candidates = std::move(group);
  }
}

std::string World::form_host(const Communicator& group) {
  const RevokeOnDeath meeting(group.get());
  local_rank_ = group.rank();
  std::vector<int> ranks(static_cast<size_t>(group.size()));
  check_mpi(MPI_Allgather(&rank_, 1, MPI_INT, ranks.data(), 1, MPI_INT, group.get()), "MPI_Allgather");
  hosts_ = {ranks};
  table_bytes_ = HostTable::bytes(group.size());
  // The first rank initializes the table before any rank uses it.
  std::string failure;
  try {
    if (local_rank_ == 0) HostTable(segment_, ranks, 0, options_.table_capacity, false);
  } catch (const Error& error) {
    failure = error.what();
  }
  check_mpi(MPI_Barrier(group.get()), "MPI_Barrier");
  return failure;
}

std::vector<std::string> World::texts(const std::string& mine) const {
  if (control_.get() == MPI_COMM_NULL) return std::vector<std::string>(static_cast<size_t>(size_), mine);
  constexpr size_t kBytes = 1024;
  char text[kBytes] = {};
  set_text(text, kBytes, mine);
  std::vector<char> all(kBytes * static_cast<size_t>(size_));
  check_mpi(MPI_Allgather(text, kBytes, MPI_CHAR, all.data(), kBytes, MPI_CHAR, control_.get()), "MPI_Allgather");
  std::vector<std::string> result;
  for (size_t r = 0; r < static_cast<size_t>(size_); ++r) result.emplace_back(&all[kBytes * r]);
  return result;
}

// Throws the failure of the lowest rank that has one, on all ranks.
void World::throw_failures(const std::string& mine) const {
  const std::vector<std::string> failures = texts(mine);
  for (int r = 0; r < size_; ++r) {
    const std::string& failure = failures[static_cast<size_t>(r)];
    if (!failure.empty()) throw AgreedError("rank " + std::to_string(label(r)) + ": " + failure);
  }
}

}  // namespace mykv
