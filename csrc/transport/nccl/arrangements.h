// The GPUs of all ranks in an operation, and the communicator over these GPUs. Both are determined once for each digest
// of all placements (plan.h), by nonblocking collective MPI calls. All ranks make these calls in the same order, the
// order of launches. The ids of communicators are exchanged in the same way.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "gpu/libraries.h"
#include "transport/nccl/plan.h"
#include "world/communicator.h"
#include "world/world.h"

namespace mykv {

// An NCCL communicator, with an NCCL rank for each GPU of each rank. It is created without blocking, and polled for
// errors.

// This rank's part of a communicator.
class NcclCommunicator {
 public:
  struct Local {
    int device;
    gpu::NcclComm comm;
  };

  // Begins to join a communicator of `size` NCCL ranks. This rank has the NCCL ranks [first, first + devices.size()).
  NcclCommunicator(const gpu::NcclUniqueId& id, int size, int first, const std::vector<int>& devices);
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // Whether all NCCL calls have finished. Throws Error if NCCL reports a failure.
  bool calls_finished(const char* what) const;
  int size() const { return size_; }
  const std::vector<Local>& locals() const { return locals_; }

  // Begins to end the communicator; call destroy() when calls_finished() is true.
  void finalize();
  void destroy();
  // Ends all operations of the communicator, finished or not.
  void abort() noexcept;

 private:
  int size_;
  std::vector<Local> locals_;
};

// All NCCL calls between construction and end() are one group (ncclGroupStart, ncclGroupEnd).
class NcclCallGroup {
 public:
  NcclCallGroup();
  ~NcclCallGroup();
  NcclCallGroup(const NcclCallGroup&) = delete;
  NcclCallGroup& operator=(const NcclCallGroup&) = delete;
  void end();

 private:
  bool open_ = true;
};

const gpu::Nccl& nccl();

struct Arrangement {
  std::vector<int> nccl_ranks;  // the NCCL rank of each rank's primary GPU
  bool same_layout = true;
  bool whole_inputs = true;
  bool whole_outputs = true;
  std::string problem;  // why these GPUs cannot work together; the same text on all ranks
  std::shared_ptr<NcclCommunicator> communicator;
};

class Arrangements {
 public:
  // Collective.
  explicit Arrangements(const World& world);
  ~Arrangements();
  Arrangements(const Arrangements&) = delete;
  Arrangements& operator=(const Arrangements&) = delete;

  // Null if begin() must be called first.
  const Arrangement* find(uint64_t digest) const;
  // Begins to determine the arrangement for the digest. Only one can be determined at a time.
  void begin(uint64_t digest, Placement mine);
  // Continues the work that begin() began. True when find() knows the arrangement. Throws Error if MPI or NCCL fails.
  bool step();
  bool busy() const { return stage_ != Stage::idle; }

  // All communicators that were created.
  const std::vector<std::shared_ptr<NcclCommunicator>>& communicators() const { return made_; }
  // Ends all communicators: finish() together with the other ranks, within `patience_us`; abort() at once.
  void finish(int64_t patience_us);
  void abort() noexcept;  // also never frees the MPI communicator, since a lost process may belong to it

 private:
  void forget() noexcept;
  enum class Stage { idle, exchanging, naming, making };

  std::string problem_of(const std::vector<Placement>& all) const;
  void arrange();
  bool tested();

  const World& world_;
  mykv::Communicator comm_;
  Stage stage_ = Stage::idle;
  MPI_Request request_ = MPI_REQUEST_NULL;
  uint64_t digest_ = 0;
  std::unique_ptr<std::vector<Placement>> exchanged_;  // MPI writes this, and reads mine_
  std::unique_ptr<Placement> mine_;
  std::unique_ptr<gpu::NcclUniqueId> id_;
  std::vector<int> devices_;  // for each rank: the number of its GPUs, then its GPUs
  int first_ = 0;             // this rank's first NCCL rank
  int size_ = 0;              // number of NCCL ranks in the communicator
  Arrangement making_;
  std::unordered_map<uint64_t, Arrangement> known_;
  std::map<std::vector<int>, std::shared_ptr<NcclCommunicator>> by_devices_;
  std::vector<std::shared_ptr<NcclCommunicator>> made_;
};

}  // namespace mykv
