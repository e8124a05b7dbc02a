// Arrays on GPUs, by NCCL. A request is one NCCL operation or one group of them. Each rank's thread launches it into
// the core's own stream on each of its GPUs, after the events that the request names and in the order of launches
// (launch_order.h). Neither the thread nor MXNet's engine blocks on a GPU: the thread polls events.
//
// A communicator is aborted if it fails, or if its operations do not end since a rank has left. Its group then ends on
// this rank, since NCCL cannot recover from an abort.
#pragma once

#include <chrono>
#include <deque>
#include <map>
#include <optional>
#include <unordered_map>
#include <utility>

#include "gpu/libraries.h"
#include "transport/gpu_roads.h"
#include "transport/nccl/launch.h"
#include "transport/nccl/launch_order.h"
#include "transport/transport.h"

namespace mykv {

class NcclTransport : public Transport {
 public:
  // Collective.
  NcclTransport(const World& world, HostTable& table, std::shared_ptr<Launcher> launcher);
  int32_t owner(const Operation&, uint64_t) const override { return kAnybody; }
  bool taken_from_root(const Operation&) const override { return false; }
  uint32_t pieces(const Operation&) const override { return static_cast<uint32_t>(world_.local_size()); }
  uint32_t sequence_numbers(const Operation&) const override { return 1; }
  size_t inline_limit() const override { return 0; }
  // Only for arrays without elements.
  void run_whole(uint32_t entry) const override { table_.finish_pieces(entry, pieces(Operation())); }
  void start(uint32_t entry, const LocalShare& share) override;
  void stop(uint32_t entry) override;
  bool progress() override;
  bool polling() const override { return !queued_.empty() || !running_.empty(); }

  // The digest of a request's placement, needed before the request arrives. Throws Error if NCCL cannot run it.
  uint64_t prepare(const Request& request);
  // Whether this rank has begun the entry and not finished it.
  bool holds(uint32_t entry) const override;
  // The runtime's thread ends: leave() after all operations have ended, abort() while operations are under way.
  // `entries`: this rank's entries in the host's table.
  void leave(const std::vector<uint32_t>& entries);
  void abort(const std::vector<uint32_t>& entries) noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  struct Item {
    uint32_t entry = 0;
    uint64_t number = 0;
    const Request* request = nullptr;
    std::shared_ptr<const void> owner;
    Placement placement;
    std::unique_ptr<Launch> launch;
  };

  Placement placement_for(const Request& request) const;
  bool move();
  bool step_first();
  bool finish();
  void watch();
  bool wait_for(const Placement& placement, Clock::time_point end) const;
  void forgo(const std::vector<uint32_t>& entries);

  const World& world_;
  HostTable& table_;
  std::shared_ptr<Launcher> launcher_;
  LaunchNumbers numbers_;
  Arrangements arrangements_;
  int usual_device_ = -1;            // the GPU for requests without memory; -1 before the first request
  std::map<uint64_t, Item> queued_;  // operations to launch, by launch number
  bool begun_ = false;               // the first queued item has begun
  std::deque<Item> running_;
  Clock::time_point moved_ = Clock::now();
  std::optional<Clock::time_point> gone_since_;  // when this rank first saw that a rank has left
  std::optional<std::pair<Clock::time_point, gpu::PeerLost>> peer_lost_;
};

// Disables NCCL for a group whose launches cannot be ordered among the launches of other groups.
void limit_to_ordered(gpu::GpuRoads* gpus, const World& world, const Launcher* launcher, bool is_world);

}  // namespace mykv
