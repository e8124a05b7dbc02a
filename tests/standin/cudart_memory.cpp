// Device memory and registered host memory.
//
// An allocation has two mappings of one memory: the pointer that CUDA's user gets lies in one without any access, so
// that host code which touches it dies as it would on a real machine; streams work through the other one.
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "cudart.h"

namespace standin {
namespace {

template <class Found, class Map>
const Found* containing(const Map& map, const void* pointer) {
  const char* address = static_cast<const char*>(pointer);
  auto after = map.upper_bound(address);
  if (after == map.begin()) return nullptr;
  const Found& candidate = *std::prev(after);
  return address < candidate.first + candidate.second.bytes ? &candidate : nullptr;
}

size_t limit() { return static_cast<size_t>(setting("STANDIN_MEMORY_MB", 4096)) << 20; }

size_t whole_pages(size_t bytes) {
  size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

int allocate(void** pointer, size_t bytes) {
  State& all = state();
  Allocation made;
  made.bytes = bytes;
  made.mapped = whole_pages(bytes);
  made.device = current_device;
  Lock lock(all.lock);
  Device& device = all.devices[current_device];
  if (device.allocated + made.mapped > limit()) return kMemoryAllocation;
  int file = memfd_create("standin-device-memory", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(made.mapped)) != 0) {
    if (file >= 0) close(file);
    return kMemoryAllocation;
  }
  void* outside = mmap(nullptr, made.mapped, PROT_NONE, MAP_SHARED, file, 0);
  void* inside = mmap(nullptr, made.mapped, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (outside == MAP_FAILED || inside == MAP_FAILED) {
    if (outside != MAP_FAILED) munmap(outside, made.mapped);
    if (inside != MAP_FAILED) munmap(inside, made.mapped);
    return kMemoryAllocation;
  }
  made.alias = static_cast<char*>(inside);
  std::memset(inside, 0xff, made.mapped);  // NaN in all floating dtypes: nobody may count on zeros
  device.allocated += made.mapped;
  all.allocations[static_cast<char*>(outside)] = made;
  *pointer = outside;
  return kSuccess;
}

int release(void* pointer) {
  State& all = state();
  Lock lock(all.lock);
  auto found = all.allocations.find(static_cast<char*>(pointer));
  if (found == all.allocations.end()) return kInvalidValue;
  const bool waits = std::any_of(all.streams.begin(), all.streams.end(), [&](const auto& one) {
    return one->device == found->second.device && !one->queue.empty();
  });
  char thread[16] = {};
  prctl(PR_GET_NAME, thread);
  if (waits && std::string(thread) == "mykv") violate("cudaFree in the core's thread, which waits for the GPU in it");
  // As the real one: it waits for all work of the device, also for an operation of NCCL's that waits for other ranks.
  int error = wait_for_device(lock, found->second.device);
  if (error != kSuccess) return error;
  found = all.allocations.find(static_cast<char*>(pointer));  // another thread may have been faster
  if (found == all.allocations.end()) return kInvalidValue;
  Allocation gone = found->second;
  all.devices[gone.device].allocated -= gone.mapped;
  all.allocations.erase(found);
  munmap(pointer, gone.mapped);
  munmap(gone.alias, gone.mapped);
  return kSuccess;
}

bool mapped(const void* pointer, size_t bytes) {
  size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  uintptr_t begin = reinterpret_cast<uintptr_t>(pointer) / page * page;
  size_t length = reinterpret_cast<uintptr_t>(pointer) + bytes - begin;
  std::vector<unsigned char> resident((length + page - 1) / page);
  return mincore(reinterpret_cast<void*>(begin), length, resident.data()) == 0;
}

int register_host(void* pointer, size_t bytes, unsigned flags) {
  if (!pointer || !bytes || (flags & ~0xfu) || !mapped(pointer, bytes)) return kInvalidValue;
  State& all = state();
  Lock lock(all.lock);
  char* begin = static_cast<char*>(pointer);
  if (find_allocation(pointer)) return kInvalidValue;
  auto next = all.registrations.lower_bound(begin);
  if (find_registration(pointer) || (next != all.registrations.end() && next->first < begin + bytes))
    return kHostMemoryAlreadyRegistered;
  all.registrations[begin] = {bytes, current_device, (flags & 1u) != 0};
  return kSuccess;
}

int unregister_host(void* pointer) {
  State& all = state();
  Lock lock(all.lock);
  auto found = all.registrations.find(static_cast<char*>(pointer));
  if (found == all.registrations.end()) return kHostMemoryNotRegistered;
  const char* begin = found->first;
  const char* end = begin + found->second.bytes;
  for (const auto& stream : all.streams)
    for (const Operation& operation : stream->queue)
      if (operation.host && operation.host < end && operation.host + operation.host_bytes > begin) {
        violate("cudaHostUnregister of memory that a copy in a stream still uses");
        break;
      }
  all.registrations.erase(found);
  return kSuccess;
}

struct Attributes {  // cudaPointerAttributes
  int type;
  int device;
  void* device_pointer;
  void* host_pointer;
};

enum Type : int { kUnregistered = 0, kHost = 1, kDevice = 2 };

}  // namespace

const std::pair<const char* const, Allocation>* find_allocation(const void* pointer) {
  return containing<std::pair<const char* const, Allocation>>(state().allocations, pointer);
}

const std::pair<const char* const, Registration>* find_registration(const void* pointer) {
  return containing<std::pair<const char* const, Registration>>(state().registrations, pointer);
}

}  // namespace standin

using namespace standin;

STANDIN_API int cudaMalloc(void** pointer, size_t bytes) {
  return called(__func__, true, [&]() -> int {
    if (!pointer) return kInvalidValue;
    *pointer = nullptr;
    return bytes ? allocate(pointer, bytes) : static_cast<int>(kSuccess);
  });
}

STANDIN_API int cudaFree(void* pointer) {
  return called(__func__, true, [&]() -> int { return pointer ? release(pointer) : static_cast<int>(kSuccess); });
}

STANDIN_API int cudaMemGetInfo(size_t* free, size_t* total) {
  return called(__func__, true, [&]() -> int {
    if (!free || !total) return kInvalidValue;
    Lock lock(state().lock);
    *total = limit();
    *free = limit() - state().devices[current_device].allocated;
    return kSuccess;
  });
}

STANDIN_API int cudaHostRegister(void* pointer, size_t bytes, unsigned flags) {
  return called(__func__, true, [&] { return register_host(pointer, bytes, flags); });
}

STANDIN_API int cudaHostUnregister(void* pointer) {
  return called(__func__, true, [&] { return unregister_host(pointer); });
}

STANDIN_API int cudaPointerGetAttributes(void* attributes, const void* pointer) {
  return called(__func__, true, [&]() -> int {
    if (!attributes) return kInvalidValue;
    auto* answer = static_cast<Attributes*>(attributes);
    void* same = const_cast<void*>(pointer);
    Lock lock(state().lock);
    if (auto* allocation = find_allocation(pointer))
      *answer = {kDevice, allocation->second.device, same, nullptr};
    else if (auto* registration = find_registration(pointer))
      *answer = {kHost, registration->second.device, same, same};
    else
      *answer = {kUnregistered, -2, nullptr, same};
    return kSuccess;
  });
}

STANDIN_API void* standin_alias(const void* pointer) {
  Lock lock(state().lock);
  if (auto* allocation = find_allocation(pointer))
    return allocation->second.alias + (static_cast<const char*>(pointer) - allocation->first);
  return find_registration(pointer) ? const_cast<void*>(pointer) : nullptr;
}

STANDIN_API int standin_device_of(const void* pointer) {
  Lock lock(state().lock);
  if (auto* allocation = find_allocation(pointer)) return allocation->second.device;
  return find_registration(pointer) ? -1 : -2;
}

STANDIN_API size_t standin_extent(const void* pointer) {
  Lock lock(state().lock);
  const char* address = static_cast<const char*>(pointer);
  if (auto* allocation = find_allocation(pointer)) return allocation->first + allocation->second.bytes - address;
  if (auto* registration = find_registration(pointer))
    return registration->first + registration->second.bytes - address;
  return 0;
}

STANDIN_API size_t standin_allocated(int device) {
  Lock lock(state().lock);
  return state().devices.at(device).allocated;
}

STANDIN_API int standin_registered(void) {
  Lock lock(state().lock);
  return static_cast<int>(state().registrations.size());
}
