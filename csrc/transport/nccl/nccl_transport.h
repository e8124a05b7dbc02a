// Arrays on GPUs, by NCCL. A request is one operation of NCCL's, or one group of them, launched by each rank's thread
// into a stream of our own on each of its GPUs, after the events that the request names and in the order of launches
// (table/launch_order.h). Neither the thread nor the engine ever waits for a GPU: the thread looks at events.
//
// A communicator that fails, or whose operations do not end since a rank has gone, is aborted, and its group ends on
// this rank: NCCL knows no way on from there.
#pragma once

#include <chrono>
#include <deque>
#include <map>
#include <optional>
#include <unordered_map>
#include <utility>

#include "gpu/nccl_api.h"
#include "transport/gpu_roads.h"
#include "transport/nccl/launch.h"
#include "transport/transport.h"

namespace mykv {

class NcclTransport : public Transport {
 public:
  // Collective.
  NcclTransport(const World& world, HostTable& table, std::shared_ptr<Launcher> launcher);
  const char* name() const override { return "nccl"; }
  int32_t owner(const Operation&, uint64_t) const override { return kAnybody; }
  bool taken_from_root(const Operation&) const override { return false; }
  uint32_t pieces(const Operation&) const override { return static_cast<uint32_t>(world_.local_size()); }
  uint32_t places(const Operation&) const override { return 1; }
  size_t inline_limit() const override { return 0; }
  // Of an array without elements.
  void run_whole(uint32_t entry) const override { table_.finish_chunks(entry, pieces(Operation())); }
  void start(uint32_t entry, const LocalShare& share) override;
  void stop(uint32_t entry) override;
  bool progress() override;
  bool polling() const override { return !queued_.empty() || !running_.empty(); }

  // Before a request is brought to the host's table: the digest of its placement. Throws Error where it cannot be run.
  uint64_t prepare(const Request& request);
  // Whether this rank has begun with the entry and not finished: it cannot be left alone.
  bool holds(uint32_t entry) const override;
  // The thread ends: at the end of all operations, or in their middle. Then `entries` are those that this rank has at
  // the host's table.
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

  Placement place(const Request& request) const;
  bool move();
  bool step_first();
  bool finish();
  void watch();
  bool wait_for(const Placement& placement, Clock::time_point end) const;
  void forgo(const std::vector<uint32_t>& entries);

  const World& world_;
  HostTable& table_;
  std::shared_ptr<Launcher> launcher_;
  Arrangements arrangements_;
  int usual_device_ = -1;            // of requests without memory; -1 before the first request
  std::map<uint64_t, Item> queued_;  // by number; the first may have begun
  bool begun_ = false;               // it has
  std::deque<Item> running_;
  Clock::time_point moved_ = Clock::now();
  std::optional<Clock::time_point> gone_since_;  // some rank has been seen to be gone
  std::optional<std::pair<Clock::time_point, gpu::PeerLost>> peer_lost_;
};

// Takes NCCL from a group whose operations could not be ordered among those of the others.
void limit_to_ordered(gpu::GpuRoads* gpus, const World& world, const Launcher* launcher, bool is_world);

}  // namespace mykv
