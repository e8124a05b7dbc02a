#include "gpu/memory.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "gpu/device.h"
#include "gpu/libraries.h"
#include "runtime/error.h"

namespace mykv::gpu {

namespace {
constexpr auto kPatience = std::chrono::seconds(30);  // for zeros; the GPU may have much to do before
}

Memory::Memory(int device, size_t bytes) : device_(device), bytes_(std::max<size_t>(bytes, 1)) {
  const Cuda& api = cuda();
  const DeviceScope scope(device);
  api.check(api.malloc(&address_, bytes_), "cudaMalloc");
  try {
    // Nobody knows in which stream it will be written first, so the zeros must be there before.
    Stream stream(device);
    api.check(api.memset_async(address_, 0, bytes_, stream.get()), "cudaMemsetAsync");
    const std::shared_ptr<const Event> zeroed = stream.record();
    const auto end = std::chrono::steady_clock::now() + kPatience;
    while (!zeroed->happened()) {
      if (std::chrono::steady_clock::now() > end) throw Error("GPU " + std::to_string(device) + " does not respond");
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  } catch (...) {
    api.free(address_);
    throw;
  }
}

Memory::~Memory() {
  // In a scope of its own, since the device may have failed: then its memory is gone anyway.
  try {
    const DeviceScope scope(device_);
    cuda().free(address_);
  } catch (const Error&) {
  }
}

}  // namespace mykv::gpu
