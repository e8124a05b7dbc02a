#include "agreement/inbox.h"

#include <algorithm>
#include <set>
#include <string>

#include "base/forks.h"
#include "base/mpi_check.h"
#include "base/planted_faults.h"

namespace mykv {

Inbox::~Inbox() {
  // MPI may still write into messages that have arrived in part; their memory is never freed.
  const bool unfinished = std::any_of(coming_.begin(), coming_.end(), [](const Coming& one) { return !one.here; });
  if (unfinished) keep_forever(std::move(coming_));
}

bool Inbox::take(std::vector<char>* bytes, int* from) {
  for (;;) {
    int there = 0;
    MPI_Message message;
    MPI_Status status;
    check_mpi(MPI_Improbe(MPI_ANY_SOURCE, tag_, comm_, &there, &message, &status), "MPI_Improbe between hosts");
    if (!there) break;
    int count = 0;
    MPI_Get_count(&status, MPI_BYTE, &count);
    coming_.push_back(
        {std::vector<char>(static_cast<size_t>(std::max(count, 0))), status.MPI_SOURCE, MPI_REQUEST_NULL, false});
    Coming& one = coming_.back();
    check_mpi(MPI_Imrecv(one.bytes.data(), count, MPI_BYTE, &message, &one.request), "MPI_Imrecv between hosts");
  }
  std::set<int> late;  // senders with an earlier message that has arrived only in part
  for (auto one = coming_.begin(); one != coming_.end(); ++one) {
    int ended = one->here;
    if (!ended) check_mpi(MPI_Test(&one->request, &ended, MPI_STATUS_IGNORE), "MPI_Test between hosts");
    one->here = ended != 0;
    if (!one->here) late.insert(one->from);
    if (late.count(one->from) > 0) continue;
    *bytes = std::move(one->bytes);
    if (!bytes->empty() && testing::is_planted(testing::Fault::message)) bytes->front() = '\xff';
    *from = one->from;
    coming_.erase(one);
    return true;
  }
  return false;
}

}  // namespace mykv
