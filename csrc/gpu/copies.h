// Copies between GPUs and host memory in streams of our own, one per device and direction, so that both directions run
// at once. Nothing here waits.
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
  // Whether all have happened. `late`: devices where something that was begun before in the same streams has not, which
  // are not asked again; those that are found so are added. Throws Error when a device has failed.
  bool happened(std::vector<int>* late);

 private:
  friend class CopyStreams;
  std::vector<std::shared_ptr<const Event>> under_way_;
};

// For one thread.
class CopyStreams {
 public:
  // Puts a copy into the stream of `device`, on which one of the addresses lies. Throws Error.
  void copy(int device, void* to, const void* from, size_t bytes);
  // All copies since the last call that threw nothing. Throws Error when they cannot be followed; they are under way
  // nevertheless.
  Copies begun();
  // Gives up following them.
  void forget() { used_.clear(); }

 private:
  std::map<int, std::unique_ptr<Stream>> streams_;
  std::vector<int> used_;  // by the copies that are not followed yet
};

// Throws Error unless this address lies on this device.
void require_on_device(const void* address, int device);

}  // namespace mykv::gpu
