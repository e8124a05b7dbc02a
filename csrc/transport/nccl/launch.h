// One operation on this rank's GPUs. No function of this file blocks.
#pragma once

#include <unistd.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "gpu/device.h"
#include "operations/request.h"
#include "table/host_table.h"
#include "transport/nccl/arrangements.h"
#include "transport/nccl/launch_order.h"
#include "transport/nccl/plan.h"

namespace mykv {

// State for NCCL that all groups of a process share: the order of launches (launch_order.h), one stream per GPU,
// and scratch memory on each GPU for values that cannot go directly from array to array.

class Launcher {
 public:
  // Creates the launcher of a new world, which current() returns from now on. `ranks`: the ranks of this host, by local
  // rank.
  static std::shared_ptr<Launcher> begin(LaunchOrder& order, std::vector<int> ranks);
  // The launcher of the last world, or null.
  static std::shared_ptr<Launcher> current();
  ~Launcher();

  LaunchOrder& order() const { return order_; }
  // The local ranks of these ranks of the world; empty if a rank is on another host.
  std::vector<int> local_ranks(const std::vector<int>& ranks) const;

  // Whether every earlier number was released. If not, `bell` rings when they are released.
  bool is_next_launch(uint64_t number, Bell& bell);
  // The operation with this number was launched, or never will be. Idempotent.
  void release(uint64_t number);

  // Use these only when is_next_launch() is true.
  gpu::Stream& stream(int device);
  char* scratch(int device, size_t bytes);
  // Allocates scratch memory now; throws Error if the GPU has none left. It is freed only with the launcher.
  void reserve(int device, size_t bytes);
  // A GPU may never finish its work: keeps all streams and memory forever.
  void keep() { kept_ = true; }

 private:
  struct Device {
    std::unique_ptr<gpu::Stream> stream;
    std::vector<void*> blocks;  // the last block is used for new operations; GPUs may still use older blocks
    size_t bytes = 0;           // bytes of the last block
  };

  Launcher(LaunchOrder& order, std::vector<int> ranks) : order_(order), ranks_(std::move(ranks)) {}
  Device& device(int number);

  LaunchOrder& order_;
  const std::vector<int> ranks_;
  const pid_t process_ = getpid();
  std::atomic<bool> kept_{false};
  std::mutex mutex_;  // guards the members below
  uint64_t next_ = 1;
  std::set<uint64_t> released_;  // released numbers greater than next_
  std::map<uint64_t, Bell*> waiting_;
  std::map<int, Device> devices_;
};

class Launch {
 public:
  // Enqueues the operation in the streams, all NCCL calls as one group. Throws Error if CUDA or NCCL fails.
  Launch(const Request& request, const Placement& placement, const Arrangement& arrangement, int rank,
         Launcher& launcher);
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  // Whether NCCL has taken all calls: then the CPU's work is done, and the next operation may be launched.
  bool finish_calls();
  // Whether the GPUs have finished the operation; call it after finish_calls().
  bool happened() const;
  const NcclCommunicator& communicator() const { return *communicator_; }

 private:
  void copy(gpu::CudaStream stream, const std::vector<PlannedCopy>& copies) const;
  void make_operators();
  std::vector<PlannedCall> in_whole_blocks(const PlannedCall& call) const;
  void call(const PlannedCall& call, size_t lane) const;

  const Request& request_;
  const std::shared_ptr<NcclCommunicator> communicator_;
  Launcher& launcher_;
  std::vector<PlannedLane> lanes_;
  std::vector<int> operators_;  // NCCL's operator for each lane
  bool own_operators_ = false;
  bool calls_finished_ = false;
  std::vector<std::shared_ptr<const gpu::Event>> ends_;
};

// Reserves memory on this rank's GPUs for a request, in addition to its arrays. It reserves what is known to be needed
// before the other ranks have arrived. Throws Error if a GPU has no memory left.
void reserve_scratch(const Request& request, const Placement& placement, int rank, Launcher& launcher);

}  // namespace mykv
