#include "world/segment_handover.h"

#include <chrono>

#include "base/error.h"
#include "base/mpi_check.h"
#include "world/door.h"

namespace mykv {

namespace {

// Rank 0's message to the other ranks: the door's name, the job's secret, the size of the segment, whether rank 0
// created a segment, and whether to connect to the door.
struct Offer {
  Token name{};
  Token secret{};
  uint64_t bytes = 0;
  int made = 0;
  int shared = 0;
};

// Hands the descriptor to the other ranks of this host until each rank that connected has it, or kPatienceMs have
// passed since all ranks called. Processes of other programs may connect too, but cannot keep a rank out.
void serve(MPI_Comm comm, Door& door, const Token& secret, int fd) {
  constexpr int kShortMs = 1;
  constexpr int kLongMs = 100;
  int callers = 0;
  const int self = 0;
  MPI_Request counting;
  check_mpi(MPI_Iallreduce(&self, &callers, 1, MPI_INT, MPI_SUM, comm, &counting), "MPI_Iallreduce");
  for (int all_called = 0; !all_called;) {
    door.attend(secret, fd, kShortMs);
    check_mpi(MPI_Test(&counting, &all_called, MPI_STATUS_IGNORE), "MPI_Test");
  }
  const auto over = std::chrono::steady_clock::now() + std::chrono::milliseconds(kPatienceMs);
  while (door.served() < callers && std::chrono::steady_clock::now() < over) door.attend(secret, fd, kLongMs);
}

Handover give(MPI_Comm comm, int size, size_t bytes, Segment* segment) {
  Offer offer;
  Handover mine;
  Door door;
  try {
    *segment = Segment::create(bytes, &mine.why_memory_is_not_shared);
    segment->commit(0, 4096);
    offer.name = random_token();
    offer.secret = random_token();
    if (mine.why_memory_is_not_shared.empty()) door.open(offer.name, &mine.why_memory_is_not_shared);
    offer.made = 1;
    offer.shared = mine.why_memory_is_not_shared.empty();
  } catch (const Error& error) {
    mine = {Handover::Result::failed, error.what(), "", 0, 0};
  }
  mine.bytes = offer.bytes = bytes;
  if (size == 1) return mine;
  check_mpi(MPI_Bcast(&offer, sizeof offer, MPI_BYTE, 0, comm), "MPI_Bcast");
  if (!offer.made || !offer.shared) return mine;
  serve(comm, door, offer.secret, segment->fd());
  mine.rejected_callers = door.rejected_callers();
  return mine;
}

Handover take(MPI_Comm comm, Segment* segment) {
  Offer offer;
  check_mpi(MPI_Bcast(&offer, sizeof offer, MPI_BYTE, 0, comm), "MPI_Bcast");
  if (!offer.made) return {Handover::Result::failed, "", "", 0, 0};
  if (!offer.shared) return {Handover::Result::separate, "", "", 0, 0};
  const FileDescriptor connection = call(offer.name, offer.secret);
  const int connected = connection ? 1 : 0;
  int callers = 0;
  MPI_Request counting;  // nonblocking as on rank 0, since MPI does not match it with a blocking call
  check_mpi(MPI_Iallreduce(&connected, &callers, 1, MPI_INT, MPI_SUM, comm, &counting), "MPI_Iallreduce");
  check_mpi(MPI_Wait(&counting, MPI_STATUS_IGNORE), "MPI_Wait");
  if (!connection) return {Handover::Result::separate, "", "", 0, 0};
  FileDescriptor fd = receive_descriptor(connection.get());
  if (!fd) return {Handover::Result::separate, "", "", 0, 0};
  try {
    *segment = Segment::map(std::move(fd), offer.bytes);
  } catch (const Error& error) {
    return {Handover::Result::failed, error.what(), "", 0, 0};
  }
  Handover mine;
  mine.bytes = offer.bytes;
  return mine;
}

}  // namespace

Handover hand_over(MPI_Comm comm, size_t bytes, Segment* segment) {
  int rank = 0;
  int size = 1;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);
  return rank == 0 ? give(comm, size, bytes, segment) : take(comm, segment);
}

}  // namespace mykv
