// One operation on this rank's GPUs. No call in here blocks.
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
  // Puts the operation into the streams, all NCCL calls as one group. Throws Error if CUDA or NCCL fails.
  Launch(const Request& request, const Placement& placement, const Arrangement& arrangement, int rank,
         Launcher& launcher);
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  // Whether NCCL has taken all calls: then the host has no more work with it, and the next operation may come.
  bool settle();
  // Whether the GPUs have finished it; call it after settle().
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

// Reserves the memory that a request needs on this rank's GPUs beside its arrays, as far as that is known before the
// other ranks have arrived. Throws Error if a GPU has no memory left.
void reserve_scratch(const Request& request, const Placement& placement, int rank, Launcher& launcher);

}  // namespace mykv
