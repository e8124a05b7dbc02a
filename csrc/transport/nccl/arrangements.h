// Which GPUs all ranks bring to an operation, and the communicator over those. Both are found once for each digest of
// all placements (placement.h), by collective calls of MPI that never block, in the order of launches, which is the
// same on all ranks; and so are the communicators' ids.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/nccl/communicator.h"
#include "transport/nccl/placement.h"
#include "world/communicator.h"
#include "world/world.h"

namespace mykv {

struct Arrangement {
  std::vector<int> places;  // in the communicator, of the primary GPU of each rank
  bool same_layout = true;
  bool whole_inputs = true;
  bool whole_outputs = true;
  std::string problem;  // why these GPUs cannot meet; the same text on all ranks
  std::shared_ptr<NcclCommunicator> communicator;
};

class Arrangements {
 public:
  // Collective.
  explicit Arrangements(const World& world);
  ~Arrangements();
  Arrangements(const Arrangements&) = delete;
  Arrangements& operator=(const Arrangements&) = delete;

  // Null where begin() must be called first.
  const Arrangement* find(uint64_t digest) const;
  // Begins to find out what the digest stands for; one at a time.
  void begin(uint64_t digest, Placement mine);
  // True when find() knows it. Throws Error where MPI or NCCL fails.
  bool step();
  bool busy() const { return stage_ != Stage::idle; }

  // All communicators that were made.
  const std::vector<std::shared_ptr<NcclCommunicator>>& communicators() const { return made_; }
  // Ends them: together with the other ranks, which takes `patience_us` at most, or at once.
  void finish(int64_t patience_us);
  void abort() noexcept;  // also the communicator of MPI, which a lost process may belong to

 private:
  enum class Stage { idle, exchanging, naming, making };

  std::string problem_of(const std::vector<Placement>& all) const;
  void arrange();
  bool tested();

  const World& world_;
  mykv::Communicator comm_;
  Stage stage_ = Stage::idle;
  MPI_Request request_ = MPI_REQUEST_NULL;
  uint64_t digest_ = 0;
  std::unique_ptr<std::vector<Placement>> exchanged_;  // MPI writes to it, and reads this:
  std::unique_ptr<Placement> mine_;
  std::unique_ptr<gpu::NcclUniqueId> id_;
  std::vector<int> devices_;  // of all ranks: how many, and which
  int first_ = 0;             // this rank's first place, of so many
  int size_ = 0;
  Arrangement making_;
  std::unordered_map<uint64_t, Arrangement> known_;
  std::map<std::vector<int>, std::shared_ptr<NcclCommunicator>> by_devices_;
  std::vector<std::shared_ptr<NcclCommunicator>> made_;
};

}  // namespace mykv
