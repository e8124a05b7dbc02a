// The GPUs of a world's ranks, and the path of operations on them.
#pragma once

#include <string>
#include <vector>

#include "operations/request.h"
#include "world/world.h"

namespace mykv::gpu {

struct Settings {
  std::string road = "auto";  // MYKV_GPU: auto, nccl or host
};

struct GpuRoads {
  bool any = false;                            // some rank has a GPU
  bool nccl = false;                           // all ranks can use NCCL
  bool chosen = false;                         // the user has chosen host memory, by MYKV_GPU=host
  std::string reason;                          // why not all ranks can use NCCL
  std::vector<std::vector<std::string>> gpus;  // the GPUs that each rank sees: their bus ids

  // The path of a request. The arguments must be the same on all ranks, except for the devices. `scattered`: see
  // Request.
  DataPath road_of(const Operation& operation, const DeviceMemory& devices, bool scattered = false) const;
};

// Collective. Throws Error on all ranks when their settings differ, or when NCCL was asked for and cannot be used.
GpuRoads find_gpu_roads(const World& world, const Settings& settings);

// Whether all the memory is on one GPU. On several GPUs, each piece would need its counterpart on the same GPU of every
// rank.
bool on_one_gpu(const DeviceMemory& devices);

// Whether NCCL computes the same as the core's kernels: NCCL has no bool and no 16-bit integers, and scales no
// integers.
bool nccl_can(const Operation& operation);

}  // namespace mykv::gpu
