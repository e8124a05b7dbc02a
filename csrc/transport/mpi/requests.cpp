#include "transport/mpi/requests.h"

#include <algorithm>
#include <functional>
#include <string>

#include "base/mpi_check.h"

namespace mykv {

namespace {

// Over TCP, Open MPI sends up to 64 KiB with the header eagerly, without a handshake. The handshake's answer would
// queue behind bulk data in the same direction: pieces of 512 KiB filled a link of 1 Gbit/s to 70%, these pieces to 94%
// (93 to 96% with MPICH 5 over UCX and over libfabric, and with Intel MPI 2021). Messages of one tag keep their order.
constexpr size_t kMostMessage = 60 << 10;
constexpr int kReceived = -1;

}  // namespace

MPI_Request* MpiRequests::add(size_t* pending, int to) {
  requests_.push_back(MPI_REQUEST_NULL);
  outstanding_.push_back({pending, to});
  ++*pending;
  return &requests_.back();
}

// Removes a request; the last request moves to its position.
void MpiRequests::remove(size_t at) {
  requests_[at] = requests_.back();
  outstanding_[at] = outstanding_.back();
  requests_.pop_back();
  outstanding_.pop_back();
}

void MpiRequests::send(const void* data, size_t bytes, int to, int tag, size_t* pending) {
  auto* at = static_cast<const char*>(data);
  for (size_t left = bytes; left > 0;) {
    const size_t some = std::min(left, kMostMessage);
    check_mpi(MPI_Isend(at, static_cast<int>(some), MPI_BYTE, to, tag, comm_, add(pending, to)),
              "MPI_Isend between hosts");
    sent_.add(some);
    at += some;
    left -= some;
  }
}

void MpiRequests::receive(void* data, size_t bytes, int from, int tag, size_t* pending) {
  auto* at = static_cast<char*>(data);
  for (size_t left = bytes; left > 0;) {
    const size_t some = std::min(left, kMostMessage);
    check_mpi(MPI_Irecv(at, static_cast<int>(some), MPI_BYTE, from, tag, comm_, add(pending, kReceived)),
              "MPI_Irecv between hosts");
    received_.add(some);
    at += some;
    left -= some;
  }
}

bool MpiRequests::poll() {
  int count = 0;
  if (requests_.empty()) {
    // Some MPIs (UCX, libfabric) report a message as sent while it waits in an internal queue, which only further MPI
    // calls empty.
    check_mpi(MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm_, &count, MPI_STATUS_IGNORE), "MPI_Iprobe between hosts");
    return false;
  }
  ended_.resize(requests_.size());
  check_mpi(
      MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &count, ended_.data(), MPI_STATUSES_IGNORE),
      "MPI_Testsome between hosts");
  if (count <= 0) return false;  // MPI_UNDEFINED is negative
  // From the highest index down: remove() moves the last request, which must not be one that is still to be removed.
  std::sort(ended_.begin(), ended_.begin() + count, std::greater<int>());
  for (int i = 0; i < count; ++i) {
    const auto at = static_cast<size_t>(ended_[static_cast<size_t>(i)]);
    --*outstanding_[at].pending;
    remove(at);
  }
  return true;
}

void MpiRequests::cancel() {
  for (size_t at = 0; at < requests_.size(); ++at) {
    if (outstanding_[at].to == kReceived && requests_[at] != MPI_REQUEST_NULL) MPI_Cancel(&requests_[at]);
  }
}

bool MpiRequests::only_to(const std::set<int>& gone) {
  bool only = true;
  for (size_t at = requests_.size(); at-- > 0;) {
    int ended = 0;
    MPI_Test(&requests_[at], &ended, MPI_STATUS_IGNORE);
    if (requests_[at] == MPI_REQUEST_NULL) {
      remove(at);
    } else {
      only = only && gone.count(outstanding_[at].to) > 0;
    }
  }
  return only;
}

}  // namespace mykv
