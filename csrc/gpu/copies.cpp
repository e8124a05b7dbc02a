#include "gpu/copies.h"

#include <algorithm>
#include <string>

#include "base/error.h"
#include "gpu/libraries.h"

namespace mykv::gpu {

namespace {

bool holds(const std::vector<int>& devices, int device) {
  return std::find(devices.begin(), devices.end(), device) != devices.end();
}

// Calls the function and adds the device to its errors.
template <class Use>
auto on_device(int device, Use&& use) {
  try {
    return use();
  } catch (const Error& error) {
    throw Error(std::string(error.what()) + ", on GPU " + std::to_string(device));
  }
}

}  // namespace

bool Copies::happened(std::vector<int>* late) {
  while (!under_way_.empty()) {
    const Event& event = *under_way_.back();
    const int device = event.device();
    if (holds(*late, device)) return false;
    if (!on_device(device, [&] { return event.happened(); })) {
      late->push_back(device);
      return false;
    }
    under_way_.pop_back();
  }
  return true;
}

void CopyStreams::copy(int device, void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  on_device(device, [&] {
    const Cuda& api = cuda();
    const DeviceScope scope(device);
    std::unique_ptr<Stream>& stream = streams_[device];
    if (!stream) stream = std::make_unique<Stream>(device);
    if (!holds(used_, device)) used_.push_back(device);
    api.check(api.memcpy_async(to, from, bytes, Cuda::kMemcpyDefault, stream->get()), "cudaMemcpyAsync");
  });
}

Copies CopyStreams::begun() {
  Copies copies;
  for (const int device : used_) {
    on_device(device, [&] { copies.under_way_.push_back(streams_[device]->record()); });
  }
  used_.clear();
  return copies;
}

void require_on_device(const void* address, int device) {
  on_device(device, [&] {
    const Cuda& api = cuda();
    const DeviceScope scope(device);
    Cuda::PointerAttributes attributes{};
    api.check(api.pointer_get_attributes(&attributes, address), "cudaPointerGetAttributes");
    if (attributes.type == Cuda::kMemoryTypeManaged) return;  // valid on all devices
    if (attributes.type != Cuda::kMemoryTypeDevice || attributes.device != device) {
      throw Error("an array's address is not in the memory of its device");
    }
  });
}

}  // namespace mykv::gpu
