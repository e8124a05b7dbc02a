// What the ranks of a world have in GPUs, and by which road the arrays on them meet.
#pragma once

#include <string>
#include <vector>

#include "operations/request.h"
#include "world/world.h"

namespace mykv::gpu {

struct Settings {
  std::string road = "auto";   // MYKV_GPU: auto, nccl or host
  std::string hosts = "nccl";  // MYKV_GPU_HOSTS: between hosts by nccl, or through the arena
};

struct GpuRoads {
  bool any = false;                            // some rank has a GPU
  bool nccl = false;                           // NCCL serves all ranks
  std::string reason;                          // why it does not
  bool layered = false;                        // but it serves each host, and sums go by Road::layered
  std::vector<std::vector<std::string>> gpus;  // that each rank sees: their addresses on the bus

  // The road of a request that all ranks bring alike but for their devices. `scattered`: see Request.
  Road road_of(const Operation& operation, const DeviceMemory& devices, bool scattered = false) const;
};

// Collective. Throws Error on all ranks when their settings differ, or when NCCL was asked for and cannot be used.
GpuRoads find_gpu_roads(const World& world, const Settings& settings);

// Whether all of it lies on one GPU: a piece would need its counterpart on the same one of every rank.
bool on_one_gpu(const DeviceMemory& devices);

// Whether NCCL computes it as the core's own kernels do: it has no bool and no integers of 16 bits, and scales no
// integers.
bool nccl_can(const Operation& operation);

}  // namespace mykv::gpu
