#include "gpu/device_memory.h"

#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <thread>

#include "base/error.h"
#include "gpu/device.h"
#include "gpu/libraries.h"

namespace mykv::gpu {

namespace {
constexpr auto kPatience = std::chrono::seconds(30);  // for zeroing; the GPU may have much other work before

thread_local bool g_must_not_wait = false;

void free_now(int device, void* address) {
  // Errors are ignored: if the device has failed, its memory is gone anyway.
  try {
    const DeviceScope scope(device);
    cuda().free(address);
  } catch (const Error&) {
  }
}

}  // namespace

Memory::Memory(int device, size_t bytes) : device_(device), bytes_(std::max<size_t>(bytes, 1)) {
  const Cuda& api = cuda();
  const DeviceScope scope(device);
  api.check(api.malloc(&address_, bytes_), "cudaMalloc");
  try {
    // Any stream may write the memory first, so the zeros must be complete before.
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
  if (getpid() != process_) return;  // CUDA's objects are the parent's
  if (!g_must_not_wait) {
    free_now(device_, address_);
    return;
  }
  try {
    std::thread([device = device_, address = address_] {
      prctl(PR_SET_NAME, "mykv cudaFree");
      free_now(device, address);
    }).detach();
  } catch (const std::system_error&) {
    // No thread can be made: the memory stays allocated until the process ends.
  }
}

void Memory::free_elsewhere() { g_must_not_wait = true; }

}  // namespace mykv::gpu
