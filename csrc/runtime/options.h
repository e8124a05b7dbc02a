// The settings of a runtime.
#pragma once

#include <cstddef>

#include "transport/gpu_roads.h"
#include "transport/transport.h"
#include "world/world.h"

namespace mykv {

struct RuntimeOptions {
  WorldOptions world;
  // Larger requests are cut into parts of this size, so that copying in, reducing and copying out overlap and stay in
  // cache. The same on all ranks.
  size_t part_bytes = 512 << 10;
  // Memory for the slots of parts under way: small enough to stay in cache. It is exceeded only when nothing moves.
  size_t staging_bytes = 4 << 20;
  NetworkOptions network;
  // Arrays of fewer bytes are not compressed between hosts: there is little to gain. The same on all ranks.
  size_t compress_bytes = 64 << 10;
  // The second limit of the stall watch, 0: none. Only compared here: one rank reports for all ranks that wait, so the
  // limit must be the same on all ranks.
  size_t stall_abort_ms = 0;
  gpu::Settings gpu;
};

}  // namespace mykv
