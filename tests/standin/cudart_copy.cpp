// Copies and fills. What pageable host memory does to a copy is as CUDA's manual has it ("API synchronization
// behavior").
#include <cstring>

#include "cudart.h"

namespace standin {
namespace {

constexpr size_t kStagedBytes = 64 << 10;  // up to here a copy from pageable memory does not wait for the stream

enum Kind : int { kHostToHost = 0, kHostToDevice = 1, kDeviceToHost = 2, kDeviceToDevice = 3, kDefault = 4 };

struct Side {
  char* use = nullptr;  // where the stream reads or writes
  bool on_device = false;
  bool pinned = false;
};

// False if the range leaves the allocation that it begins in.
bool find_side(const void* pointer, size_t bytes, int device, Side* side) {
  char* address = static_cast<char*>(const_cast<void*>(pointer));
  if (auto* allocation = find_allocation(pointer)) {
    size_t offset = address - allocation->first;
    *side = {allocation->second.alias + offset, true, false};
    return offset + bytes <= allocation->second.bytes;
  }
  *side = {address, false, false};
  if (auto* registration = find_registration(pointer)) {
    bool whole = address + bytes <= registration->first + registration->second.bytes;
    side->pinned = whole && (registration->second.portable || registration->second.device == device);
  }
  return true;
}

bool fits(int kind, const Side& to, const Side& from) {
  if (kind == kDefault) return true;
  return from.on_device == (kind == kDeviceToHost || kind == kDeviceToDevice) &&
         to.on_device == (kind == kHostToDevice || kind == kDeviceToDevice);
}

int copy(void* to, const void* from, size_t bytes, int kind, void* handle, bool async) {
  if (kind < kHostToHost || kind > kDefault) return kInvalidMemcpyDirection;
  Lock lock(state().lock);
  auto stream = find_stream(handle, current_device);
  if (!stream) return kInvalidResourceHandle;
  if (!bytes) return kSuccess;
  if (!to || !from) return kInvalidValue;
  Side target, source;
  if (!find_side(to, bytes, stream->device, &target) || !find_side(from, bytes, stream->device, &source) ||
      !fits(kind, target, source))
    return kInvalidValue;

  Operation operation;
  if (!source.on_device && !source.pinned) {
    // cudaMemcpy() waits for the stream first, and returns when the values are staged: not on the device yet.
    if (!async || bytes > kStagedBytes) {
      int error = wait_for(lock, {stream, stream->submitted});
      if (error != kSuccess) return error;
    }
    auto staged = std::make_shared<std::vector<char>>(source.use, source.use + bytes);
    operation.run = [=] { return std::memcpy(target.use, staged->data(), bytes), 0; };
  } else {
    operation.run = [=] { return std::memmove(target.use, source.use, bytes), 0; };
  }
  operation.memory = true;
  const Side* host = target.on_device ? &source : &target;
  if (host->pinned) {
    operation.host = host->use;
    operation.host_bytes = bytes;
  }
  int error = submit(stream, std::move(operation));
  const bool pageable_target = !target.on_device && !target.pinned;
  const bool wait = pageable_target || (!async && host->pinned);
  return error == kSuccess && wait ? wait_for(lock, {stream, stream->submitted}) : error;
}

}  // namespace
}  // namespace standin

using namespace standin;

STANDIN_API int cudaMemcpy(void* to, const void* from, size_t bytes, int kind) {
  return called(__func__, true, [&] { return copy(to, from, bytes, kind, nullptr, false); });
}

STANDIN_API int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void* stream) {
  return called(__func__, true, [&] { return copy(to, from, bytes, kind, stream, true); });
}

STANDIN_API int cudaMemsetAsync(void* pointer, int value, size_t bytes, void* handle) {
  return called(__func__, true, [&]() -> int {
    Lock lock(state().lock);
    auto stream = find_stream(handle, current_device);
    // A kernel needs its device to be the current one; a fill may be a kernel.
    if (!stream || stream->device != current_device) return kInvalidResourceHandle;
    if (!bytes) return kSuccess;
    Side side;
    if (!find_side(pointer, bytes, stream->device, &side) || !(side.on_device || side.pinned)) return kInvalidValue;
    Operation operation;
    operation.memory = true;
    operation.run = [=] { return std::memset(side.use, value, bytes), 0; };
    return submit(stream, std::move(operation));
  });
}
