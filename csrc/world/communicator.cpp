#include "world/communicator.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <numeric>
#include <vector>

#include "base/error.h"
#include "base/mpi_check.h"

// A weak symbol: only an MPI with ULFM defines this function, and mpi.h does not declare it.
extern "C" __attribute__((weak)) int MPIX_Comm_revoke(MPI_Comm comm);

namespace mykv {

namespace {

struct Meetings {
  std::mutex mutex;
  std::vector<MPI_Comm> all;
  bool lost = false;
};
Meetings& g_meetings = *new Meetings;

}  // namespace

RevokeOnDeath::RevokeOnDeath(MPI_Comm comm) : comm_(comm) {
  std::lock_guard<std::mutex> lock(g_meetings.mutex);
  if (g_meetings.lost) throw Error("a rank was lost while the ranks of this machine met");
  g_meetings.all.push_back(comm);
}

RevokeOnDeath::~RevokeOnDeath() {
  std::lock_guard<std::mutex> lock(g_meetings.mutex);
  g_meetings.all.erase(std::find(g_meetings.all.begin(), g_meetings.all.end(), comm_));
}

void RevokeOnDeath::lose() {
  std::lock_guard<std::mutex> lock(g_meetings.mutex);
  g_meetings.lost = true;
  if (MPIX_Comm_revoke == nullptr) return;
  for (MPI_Comm comm : g_meetings.all) MPIX_Comm_revoke(comm);
}

void RevokeOnDeath::begin_again() {
  std::lock_guard<std::mutex> lock(g_meetings.mutex);
  g_meetings.lost = false;
}

Communicator Communicator::duplicate(MPI_Comm comm, const char* what) {
  MPI_Comm copy;
  check_mpi(MPI_Comm_dup(comm, &copy), what);
  MPI_Comm_set_errhandler(copy, MPI_ERRORS_RETURN);
  return Communicator(copy);
}

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

namespace {

constexpr size_t kMost = 8;  // newest pairs that are kept for the same processes; older pairs are never used again

struct Kept {
  uint64_t next = 1;  // number of the next pair
  std::vector<CommunicatorPair> pairs;
};

struct Pool {
  std::mutex mutex;
  std::map<std::vector<int>, Kept> of;
};
Pool& g_pool = *new Pool;

// Drops all earlier messages of a communicator. Each rank sends an empty message as a mark, which mykv sends nowhere
// else. MPI keeps the order of a sender's messages, so all messages before the mark are old.
void empty(MPI_Comm comm) {
  int size = 0, rank = 0;
  MPI_Comm_size(comm, &size);
  MPI_Comm_rank(comm, &rank);
  std::vector<MPI_Request> marks(static_cast<size_t>(size), MPI_REQUEST_NULL);
  for (int to = 0; to < size; ++to) {
    if (to == rank) continue;
    check_mpi(MPI_Isend(nullptr, 0, MPI_BYTE, to, 0, comm, &marks[static_cast<size_t>(to)]), "MPI_Isend");
  }
  std::vector<char> thrown_away;
  for (int from = 0; from < size; ++from) {
    for (int bytes = from == rank ? 0 : 1; bytes > 0;) {
      MPI_Message message;
      MPI_Status status;
      check_mpi(MPI_Mprobe(from, MPI_ANY_TAG, comm, &message, &status), "MPI_Mprobe");
      check_mpi(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
      thrown_away.resize(static_cast<size_t>(bytes));
      check_mpi(MPI_Mrecv(thrown_away.data(), bytes, MPI_BYTE, &message, MPI_STATUS_IGNORE), "MPI_Mrecv");
    }
  }
  check_mpi(MPI_Waitall(size, marks.data(), MPI_STATUSES_IGNORE), "MPI_Waitall");
}

}  // namespace

std::vector<int> processes_of(MPI_Comm comm) {
  MPI_Group world, group;
  MPI_Comm_group(MPI_COMM_WORLD, &world);
  MPI_Comm_group(comm, &group);
  int size = 0;
  MPI_Group_size(group, &size);
  std::vector<int> ranks(static_cast<size_t>(size)), processes(ranks.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  MPI_Group_translate_ranks(group, size, ranks.data(), world, processes.data());
  MPI_Group_free(&group);
  MPI_Group_free(&world);
  if (std::find(processes.begin(), processes.end(), MPI_UNDEFINED) != processes.end()) processes.clear();
  return processes;
}

CommunicatorPair take_communicators(MPI_Comm comm, const std::vector<int>& processes) {
  using Offer = std::array<uint64_t, 1 + kMost>;  // the next number, and the numbers of the pairs that are kept
  Offer mine{};
  {
    std::lock_guard<std::mutex> lock(g_pool.mutex);
    const Kept& kept = g_pool.of[processes];
    mine[0] = kept.next;
    for (size_t k = 0; k < kept.pairs.size(); ++k) mine[1 + k] = kept.pairs[k].number;
  }
  const RevokeOnDeath meeting(comm);
  std::vector<Offer> all(processes.size());
  check_mpi(MPI_Allgather(mine.data(), static_cast<int>(mine.size()), MPI_UINT64_T, all.data(),
                          static_cast<int>(mine.size()), MPI_UINT64_T, comm),
            "MPI_Allgather");
  CommunicatorPair pair;
  for (const Offer& one : all) pair.number = std::max(pair.number, one[0]);
  const auto kept_by_all = [&](uint64_t number) {
    return std::all_of(all.begin(), all.end(),
                       [&](const Offer& one) { return std::find(one.begin() + 1, one.end(), number) != one.end(); });
  };
  {
    std::lock_guard<std::mutex> lock(g_pool.mutex);
    Kept& kept = g_pool.of[processes];
    kept.next = pair.number + 1;
    auto least = kept.pairs.end();
    for (auto one = kept.pairs.begin(); one != kept.pairs.end(); ++one) {
      if (kept_by_all(one->number) && (least == kept.pairs.end() || one->number < least->number)) least = one;
    }
    if (least == kept.pairs.end()) return pair;
    pair = *least;
    kept.pairs.erase(least);
  }
  const RevokeOnDeath emptying_control(pair.control), emptying_data(pair.data);
  empty(pair.control);
  empty(pair.data);
  return pair;
}

void give_back_communicators(const std::vector<int>& processes, const CommunicatorPair& pair) {
  std::lock_guard<std::mutex> lock(g_pool.mutex);
  std::vector<CommunicatorPair>& pairs = g_pool.of[processes].pairs;
  pairs.push_back(pair);
  if (pairs.size() <= kMost) return;
  // Drops the oldest pair. So all ranks keep the same pairs even if ranks give them back in different orders, and a
  // pair that another rank never gives back is eventually dropped.
  const auto older = [](const CommunicatorPair& a, const CommunicatorPair& b) { return a.number < b.number; };
  pairs.erase(std::min_element(pairs.begin(), pairs.end(), older));
}

}  // namespace mykv
