#include "transport/gpu_roads.h"
#include "transport/host/host_transport.h"
#include "transport/mpi/mpi_transport.h"
#include "transport/transport.h"

namespace mykv {

std::unique_ptr<Transport> choose_transport(const World& world, HostTable& table, const NetworkOptions& options) {
  if (world.hosts().size() == 1) return std::make_unique<HostTransport>(world, table);
  return std::make_unique<MpiTransport>(world, table, options);
}

std::vector<std::pair<std::string, std::string>> transport_report(const World* world, const gpu::GpuRoads* gpus) {
  const std::string uninitialized = "not initialized";
  const bool one_host = world != nullptr && world->hosts().size() == 1;
  return {
      {"host", world == nullptr ? uninitialized : ""},
      {"mpi", world == nullptr ? uninitialized
              : one_host       ? "all ranks share one host's memory"
                               : ""},
      {"nccl", gpus == nullptr ? uninitialized : gpus->reason},
  };
}

}  // namespace mykv
