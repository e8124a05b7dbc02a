// Everything that a runtime uses: the world, the host's table, this rank's memory, and the transports.
#pragma once

#include <cstddef>
#include <memory>

#include "agreement/agreement.h"
#include "agreement/inquiry.h"
#include "gpu/memory.h"
#include "memory/region.h"
#include "table/host_table.h"
#include "transport/gpu_roads.h"
#include "transport/nccl/nccl_transport.h"
#include "transport/transport.h"
#include "world/world.h"

namespace mykv {

struct RuntimeOptions {
  WorldOptions world;
  // Larger requests are cut into parts of this size, so that copying in, reducing and copying out overlap and stay in
  // cache. The same on all ranks.
  size_t part_bytes = 512 << 10;
  // Memory for the slots of parts under way: small enough to stay in cache. Exceeded only while no operation advances.
  size_t staging_bytes = 4 << 20;
  NetworkOptions network;
  // Arrays of fewer bytes are not compressed between hosts: there is little to gain. The same on all ranks.
  size_t compress_bytes = 64 << 10;
  // After this time the stall watch ends operations; 0: never. The core only checks that the limit is the same on all
  // ranks, since one rank reports for all ranks that wait.
  size_t stall_abort_ms = 0;
  gpu::Settings gpu;
};

struct RuntimeContext {
  // Collective; throws Error on all ranks when their settings differ.
  RuntimeContext(std::unique_ptr<World> made, const RuntimeOptions& given);

  Transport& transport_of(const Operation& operation) const {
    return operation.road == DataPath::nccl ? *nccl : *transport;
  }
  // This rank's number in messages.
  int label() const { return world.label(world.rank()); }
  Bell& bell() { return table.bell(world.local_rank()); }

  const RuntimeOptions options;
  const std::unique_ptr<World> owned;
  World& world{*owned};
  HostTable table;
  std::shared_ptr<Launcher> launcher;  // released when the runtime's thread ends
  const gpu::GpuRoads gpus;
  Region region;
  gpu::PinnedSlots pinned;  // used by the runtime's thread only
  const std::unique_ptr<Transport> transport;
  const std::unique_ptr<NcclTransport> nccl;  // null: not all ranks can use NCCL
  Agreement agreement;
  Inquiry inquiry;
};

}  // namespace mykv
