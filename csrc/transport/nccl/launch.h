// One operation on its way through this rank's GPUs. Nothing in here waits.
#pragma once

#include <memory>
#include <vector>

#include "operations/request.h"
#include "transport/nccl/arrangements.h"
#include "transport/nccl/launcher.h"
#include "transport/nccl/plan.h"

namespace mykv {

class Launch {
 public:
  // Puts the operation into the streams, all calls of NCCL's as one group. Throws Error where CUDA or NCCL fails.
  Launch(const Request& request, const Placement& placement, const Arrangement& arrangement, int rank,
         Launcher& launcher);
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  // Whether NCCL has taken it all: then nothing of it is left to the host, and the next operation may come.
  bool settle();
  // Whether the GPUs are through with it, asked after settle().
  bool happened() const;
  const NcclCommunicator& communicator() const { return *communicator_; }

 private:
  void copy(gpu::CudaStream stream, const std::vector<PlannedCopy>& copies) const;
  void make_operators();
  void call(const PlannedCall& call, size_t lane) const;

  const Request& request_;
  const std::shared_ptr<NcclCommunicator> communicator_;
  Launcher& launcher_;
  std::vector<PlannedLane> lanes_;
  std::vector<int> operators_;  // of each lane
  bool own_operators_ = false;
  bool settled_ = false;
  std::vector<std::shared_ptr<const gpu::Event>> ends_;
};

// Memory that a request takes on this rank's GPUs beside its arrays, as far as that is known before the other ranks
// have come; throws Error where a GPU has none.
void reserve_scratch(const Request& request, const Placement& placement, int rank, Launcher& launcher);

}  // namespace mykv
