#include "gpu/device.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "base/error.h"
#include "gpu/libraries.h"

namespace mykv::gpu {

namespace {

// Never destroyed, since CUDA may have shut down already.
struct Store {
  std::mutex mutex;
  std::map<int, std::vector<CudaEvent>> events;  // events that are not in use, by device
};

Store& store() {
  static Store& one = *new Store;
  return one;
}

}  // namespace

DeviceScope::DeviceScope(int device) {
  const Cuda& api = cuda();
  api.check(api.get_device(&before_), "cudaGetDevice");
  if (before_ == device) return;
  api.check(api.set_device(device), "cudaSetDevice");
  changed_ = true;
}

DeviceScope::~DeviceScope() {
  if (changed_) cuda().set_device(before_);
}

std::shared_ptr<const Event> Event::record(int device, CudaStream stream) {
  const Cuda& api = cuda();
  const DeviceScope scope(device);
  CudaEvent event = nullptr;
  {
    std::lock_guard<std::mutex> lock(store().mutex);
    std::vector<CudaEvent>& free = store().events[device];
    if (!free.empty()) {
      event = free.back();
      free.pop_back();
    }
  }
  if (event == nullptr) api.check(api.event_create(&event, Cuda::kEventDisableTiming), "cudaEventCreateWithFlags");
  const std::shared_ptr<const Event> made(new Event(device, event));
  api.check(api.event_record(event, stream), "cudaEventRecord");
  return made;
}

Event::~Event() {
  // The event belongs to the parent; here, the store's mutex may be locked forever.
  if (forks_ != fork_number()) return;
  std::lock_guard<std::mutex> lock(store().mutex);
  store().events[device_].push_back(event_);
}

bool Event::happened() const {
  const Cuda& api = cuda();
  const int code = api.event_query(event_);
  if (code == Cuda::kNotReady) {
    api.get_last_error();
    return false;
  }
  api.check(code, "cudaEventQuery");
  return true;
}

Stream::Stream(int device) : device_(device) {
  const Cuda& api = cuda();
  const DeviceScope scope(device);
  int least = 0, greatest = 0;
  api.check(api.get_stream_priority_range(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  api.check(api.stream_create(&stream_, Cuda::kStreamNonBlocking, greatest), "cudaStreamCreateWithPriority");
}

Stream::~Stream() { cuda().stream_destroy(stream_); }

void Stream::wait(const Event& event) {
  const Cuda& api = cuda();
  const DeviceScope scope(device_);
  api.check(api.stream_wait_event(stream_, event.get(), 0), "cudaStreamWaitEvent");
}

namespace {

bool holds(const std::vector<int>& devices, int device) {
  return std::find(devices.begin(), devices.end(), device) != devices.end();
}

// Calls the function and adds the device to its error texts.
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
