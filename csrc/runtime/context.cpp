#include "runtime/context.h"

#include "transport/gpu_roads.h"
#include "transport/host/host_transport.h"
#include "transport/mpi/mpi_transport.h"
#include "transport/transport.h"

namespace mykv {

std::unique_ptr<Transport> choose_transport(const World& world, HostTable& table, const NetworkOptions& options) {
  if (!world.has_several_hosts()) return std::make_unique<HostTransport>(world, table);
  return std::make_unique<MpiTransport>(world, table, options);
}

std::vector<std::pair<std::string, std::string>> transport_report(const World* world, const gpu::GpuRoads* gpus) {
  const std::string uninitialized = "not initialized";
  const bool one_host = world != nullptr && !world->has_several_hosts();
  return {
      {"host", world == nullptr ? uninitialized : ""},
      {"mpi", world == nullptr ? uninitialized
              : one_host       ? "all ranks share one host's memory"
                               : ""},
      {"nccl", gpus == nullptr ? uninitialized : gpus->reason},
  };
}

namespace {

// Process sets use the launcher of the world, so that one order holds for their launches and the world's.
std::shared_ptr<Launcher> launcher_of(const World& world, HostTable& table) {
  if (world.is_subset()) return Launcher::current();
  LaunchOrder& order = LaunchOrder::in(table);
  if (world.local_rank() == 0) order.init();
  return Launcher::begin(order, world.host_ranks());
}

gpu::GpuRoads gpus_of(const World& world, const RuntimeOptions& options, const Launcher* launcher) {
  gpu::GpuRoads gpus = gpu::find_gpu_roads(world, options.gpu);
  limit_to_ordered(&gpus, world, launcher, !world.is_subset());
  return gpus;
}

}  // namespace

RuntimeContext::RuntimeContext(std::unique_ptr<World> made, const RuntimeOptions& given)
    : options(given),
      owned(std::move(made)),
      table(world.segment(), world.labels(world.host_ranks()), world.local_rank(), 0, world.has_several_hosts()),
      launcher(launcher_of(world, table)),
      gpus(gpus_of(world, options, launcher.get())),
      region(world.segment(), world.region_begin(), world.region_bytes(), world.has_several_hosts()),
      pinned(world.segment(), region),
      transport(choose_transport(world, table, options.network)),
      nccl(gpus.nccl ? std::make_unique<NcclTransport>(world, table, launcher) : nullptr),
      agreement(world, table, 2 * options.network.bytes, options.network.fan_out),
      inquiry(world, table) {
  table.beat();
  world.require_same("the size of parts (MYKV_PART_BYTES)", options.part_bytes);
  world.require_same("the memory for other hosts (MYKV_NETWORK_BYTES)", options.network.bytes);
  world.require_same("the fan-out of the tree of hosts (MYKV_FAN_OUT)", options.network.fan_out);
  world.require_same("the most hosts in one row of an exchange (MYKV_EXCHANGE)", options.network.most_in_a_row);
  world.require_same("the size from which arrays are compressed (MYKV_COMPRESS_BYTES)", options.compress_bytes);
  world.require_same("the stall watch's second limit in milliseconds (MYKV_STALL_ABORT_S)", options.stall_abort_ms);
}

}  // namespace mykv
