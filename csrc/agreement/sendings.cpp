#include "agreement/sendings.h"

#include <iterator>
#include <utility>

#include "base/forks.h"
#include "base/mpi_check.h"

namespace mykv {

Sendings::~Sendings() {
  // MPI may still read messages that are being sent; their memory is never freed.
  if (!all_.empty()) keep_forever(std::move(all_));
}

void Sendings::send(Bytes bytes, int to, int tag) {
  all_.push_back({std::move(bytes), MPI_REQUEST_NULL});
  Sending& s = all_.back();
  check_mpi(MPI_Isend(s.bytes->data(), static_cast<int>(s.bytes->size()), MPI_BYTE, to, tag, comm_, &s.request),
            "MPI_Isend between hosts");
}

void Sendings::progress() {
  for (auto it = all_.begin(); it != all_.end();) {
    int ended = 0;
    check_mpi(MPI_Test(&it->request, &ended, MPI_STATUS_IGNORE), "MPI_Test between hosts");
    it = ended ? all_.erase(it) : std::next(it);
  }
}

}  // namespace mykv
