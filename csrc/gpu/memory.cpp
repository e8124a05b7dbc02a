#include "gpu/memory.h"

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
constexpr auto kPatience =
    std::chrono::seconds(30);  // how long zeroing may take; much other work may be queued before it

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
    // Any stream may be the first to write the memory, so the zeros must be complete before this constructor returns.
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
  if (getpid() != process_) return;  // CUDA's objects belong to the parent
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
    // No thread can be started: the memory stays allocated until the process ends.
  }
}

void Memory::free_elsewhere() { g_must_not_wait = true; }

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kAtOnce = 8;  // slots that are registered together: many pages take about as long as one page
constexpr size_t kLeast = size_t{256} << 10;

}  // namespace

// Powers of two, so that there are few different sizes.
size_t PinnedSlots::rounded(size_t bytes) {
  size_t size = kPage;
  while (size < bytes) size *= 2;
  return size;
}

size_t PinnedSlots::allocate(size_t bytes) {
  const size_t size = rounded(bytes);
  std::vector<size_t>& free = free_[size];
  if (free.empty()) {
    const size_t all = std::max(kAtOnce * size, kLeast);
    const size_t begin = region_.reserve(all);
    try {
      segment_.commit(begin, all);
    } catch (const Error&) {
      region_.release_reserved(begin, all);
      throw;
    }
    const Cuda& api = cuda();
    try {
      api.check(api.host_register(segment_.base() + begin, all, Cuda::kHostRegisterPortable), "cudaHostRegister");
      registered_.push_back(begin);
    } catch (const Error& error) {
      api.get_last_error();
      problem_ = error.what();
    }
    for (size_t at = all; at >= size; at -= size) free.push_back(begin + at - size);
  }
  const size_t offset = free.back();
  free.pop_back();
  return offset;
}

void PinnedSlots::unregister() {
  for (const size_t begin : registered_) cuda().host_unregister(segment_.base() + begin);
  registered_.clear();
}

}  // namespace mykv::gpu
