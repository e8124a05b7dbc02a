#include "world/revoke_on_death.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include "base/error.h"

// Weak: only an MPI with ULFM has it, and mpi.h does not declare it.
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

}  // namespace mykv
