// Copies between GPUs and host memory in the core's own streams, one per device and direction, so that both directions
// run at once. No call blocks.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <vector>

#include "gpu/device.h"

namespace mykv::gpu {

// Copies that were begun together.
class Copies {
 public:
  // Whether all copies have happened. `late`: devices whose earlier copies in the same streams have not happened; they
  // are not asked again, and further such devices are added. Throws Error if a device has failed.
  bool happened(std::vector<int>* late);

 private:
  friend class CopyStreams;
  std::vector<std::shared_ptr<const Event>> under_way_;
};

// Not thread-safe.
class CopyStreams {
 public:
  // Puts a copy into the stream of `device`, on which one of the addresses lies. Throws Error.
  void copy(int device, void* to, const void* from, size_t bytes);
  // All copies since the last successful call. Throws Error if they cannot be tracked; they are under way nevertheless.
  Copies begun();
  // Drops all copies that are not tracked yet.
  void forget() { used_.clear(); }

 private:
  std::map<int, std::unique_ptr<Stream>> streams_;
  std::vector<int> used_;  // devices with copies that are not tracked yet
};

// Throws Error unless this address lies on this device.
void require_on_device(const void* address, int device);

}  // namespace mykv::gpu
