// Stand-in for libcudart: errors, devices, counters and planted failures. No CUDA header is used: the names, prototypes
// and numbers are those of CUDA's C interface (11 and 12).
#include "cudart.h"

#include <pthread.h>
#include <unistd.h>

#include <cstring>

namespace standin {

thread_local int current_device = 0;

namespace {

thread_local int last_error = kSuccess;
bool used = false;    // a context exists that does not survive a fork
bool forked = false;  // this process is a child of one that used CUDA

// Devices of the machine that this process sees, as CUDA reads CUDA_VISIBLE_DEVICES: up to the first that is not there.
std::vector<int> visible() {
  int devices = static_cast<int>(setting("STANDIN_DEVICES", 2));
  std::vector<int> seen;
  const char* text = std::getenv("CUDA_VISIBLE_DEVICES");
  if (!text) {
    for (int device = 0; device < devices; ++device) seen.push_back(device);
    return seen;
  }
  std::stringstream all(text);
  for (std::string entry; std::getline(all, entry, ',');) {
    char* end = nullptr;
    long device = std::strtol(entry.c_str(), &end, 10);
    if (end == entry.c_str() || device < 0 || device >= devices) break;
    seen.push_back(static_cast<int>(device));
  }
  return seen;
}

State* make() {
  auto* made = new State;
  for (int physical : visible()) {
    Device device;
    device.physical = physical;
    char text[16];
    std::snprintf(text, sizeof text, "0000:%02x:00.0", 0x10 + physical);
    device.bus_id = text;
    made->devices.push_back(std::move(device));
  }
  made->plants = planted("STANDIN_PLANT");
  pthread_atfork(nullptr, nullptr, [] { forked = used; });
  return made;
}

int version() { return static_cast<int>(setting("STANDIN_CUDA_VERSION", 12040)); }

int driver_version() { return static_cast<int>(setting("STANDIN_DRIVER_VERSION", version())); }

int machine_error() {
  if (forked) return kInitialization;
  if (driver_version() / 1000 < version() / 1000) return kInsufficientDriver;
  if (state().devices.empty()) return kNoDevice;
  return kSuccess;
}

int plant_of(const std::string& function, long call) {
  State& all = state();
  for (const Plant& plant : all.plants) {
    if (plant.function != function || plant.nth != call) continue;
    if (plant.lost && current_device < static_cast<int>(all.devices.size())) {
      all.devices[current_device].error = plant.code;
      all.changed.notify_all();
    }
    return plant.code;
  }
  return kSuccess;
}

struct Text {
  int code;
  const char* name;
  const char* text;
};

const Text kTexts[] = {
    {0, "cudaSuccess", "no error"},
    {1, "cudaErrorInvalidValue", "invalid argument"},
    {2, "cudaErrorMemoryAllocation", "out of memory"},
    {3, "cudaErrorInitializationError", "initialization error"},
    {4, "cudaErrorCudartUnloading", "driver shutting down"},
    {21, "cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
    {35, "cudaErrorInsufficientDriver", "CUDA driver version is insufficient for CUDA runtime version"},
    {46, "cudaErrorDevicesUnavailable", "CUDA-capable device(s) is/are busy or unavailable"},
    {100, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {101, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {201, "cudaErrorDeviceUninitialized", "invalid device context"},
    {209, "cudaErrorNoKernelImageForDevice", "no kernel image is available for execution on the device"},
    {214, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
    {304, "cudaErrorOperatingSystem", "OS call failed or operation not supported on this OS"},
    {400, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {600, "cudaErrorNotReady", "device not ready"},
    {700, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {702, "cudaErrorLaunchTimeout", "the launch timed out and was terminated"},
    {709, "cudaErrorContextIsDestroyed", "context is destroyed"},
    {712, "cudaErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped"},
    {713, "cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"},
    {719, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {801, "cudaErrorNotSupported", "operation not supported"},
    {999, "cudaErrorUnknown", "unknown error"},
};

const Text* text_of(int code) {
  for (const Text& text : kTexts)
    if (text.code == code) return &text;
  return nullptr;
}

}  // namespace

State& state() {
  static State* made = make();
  return *made;
}

int called(const char* function, bool on_device, const std::function<int()>& body) {
  int error = kSuccess;
  State& all = state();
  if (!forked) {  // the lock may have been held by another thread in the parent
    std::lock_guard<std::mutex> lock(all.lock);
    error = plant_of(function, ++all.calls[function]);
    if (error == kSuccess && on_device) {
      error = machine_error();
      if (error == kSuccess) {
        used = true;
        error = device_error(current_device);
      }
    }
  } else if (on_device) {
    error = kInitialization;
  }
  if (error == kSuccess) error = body();
  if (error != kSuccess) last_error = error;
  return error;
}

int device_error(int device) {
  State& all = state();
  return device < static_cast<int>(all.devices.size()) ? all.devices[device].error : static_cast<int>(kInvalidDevice);
}

void violate(const std::string& text) {
  std::fprintf(stderr, "stand-in, process %d: %s\n", static_cast<int>(getpid()), text.c_str());
  state().violations.push_back(text);
}

}  // namespace standin

using namespace standin;

STANDIN_API int cudaGetDeviceCount(int* count) {
  return called(__func__, false, [&]() -> int {
    if (!count) return kInvalidValue;
    *count = 0;
    int error = machine_error();
    if (error != kSuccess) return error;
    used = true;
    *count = static_cast<int>(state().devices.size());
    return kSuccess;
  });
}

STANDIN_API int cudaGetDevice(int* device) {
  return called(__func__, false, [&]() -> int {
    if (!device) return kInvalidValue;
    *device = current_device;
    return machine_error();
  });
}

STANDIN_API int cudaSetDevice(int device) {
  return called(__func__, false, [&]() -> int {
    int error = machine_error();
    if (error != kSuccess) return error;
    std::lock_guard<std::mutex> lock(state().lock);
    if (device < 0 || device >= static_cast<int>(state().devices.size())) return kInvalidDevice;
    used = true;
    current_device = device;
    return device_error(device);
  });
}

STANDIN_API int cudaRuntimeGetVersion(int* number) {
  return called(__func__, false, [&] { return number ? (*number = version(), kSuccess) : kInvalidValue; });
}

STANDIN_API int cudaDriverGetVersion(int* number) {
  return called(__func__, false, [&] { return number ? (*number = driver_version(), kSuccess) : kInvalidValue; });
}

STANDIN_API int cudaDeviceGetPCIBusId(char* text, int bytes, int device) {
  return called(__func__, false, [&]() -> int {
    int error = machine_error();
    if (error != kSuccess) return error;
    if (device < 0 || device >= static_cast<int>(state().devices.size())) return kInvalidDevice;
    const std::string& id = state().devices[device].bus_id;
    if (!text || bytes <= static_cast<int>(id.size())) return kInvalidValue;
    std::memcpy(text, id.c_str(), id.size() + 1);
    return kSuccess;
  });
}

STANDIN_API int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return called(__func__, true, [&] {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return kSuccess;
  });
}

STANDIN_API const char* cudaGetErrorName(int error) {
  const Text* text = text_of(error);
  return text ? text->name : "unrecognized error code";
}

STANDIN_API const char* cudaGetErrorString(int error) {
  const Text* text = text_of(error);
  return text ? text->text : "unrecognized error code";
}

STANDIN_API int cudaPeekAtLastError(void) { return last_error; }

STANDIN_API int cudaGetLastError(void) {
  int error = last_error;
  last_error = kSuccess;
  return error;
}

STANDIN_API void standin_plant(const char* function, int nth, int code) {
  std::lock_guard<std::mutex> lock(state().lock);
  state().plants.push_back({function, state().calls[function] + nth, code, false});
}

STANDIN_API void standin_lose_device(int device, int code) {
  Lock lock(state().lock);
  if (code == kSuccess) revive(lock, device);
  state().devices.at(device).error = code;
  state().changed.notify_all();
}

STANDIN_API long standin_calls(const char* function) {
  std::lock_guard<std::mutex> lock(state().lock);
  auto found = state().calls.find(function);
  return found == state().calls.end() ? 0 : found->second;
}

STANDIN_API int standin_current_device(void) { return current_device; }

STANDIN_API const char* standin_bus_id(int device) { return state().devices.at(device).bus_id.c_str(); }

STANDIN_API int standin_device_error(int device) {
  std::lock_guard<std::mutex> lock(state().lock);
  return device_error(device);
}

STANDIN_API void standin_violate(const char* text) {
  std::lock_guard<std::mutex> lock(state().lock);
  violate(text);
}

STANDIN_API int standin_violations(void) {
  std::lock_guard<std::mutex> lock(state().lock);
  return static_cast<int>(state().violations.size());
}

STANDIN_API const char* standin_violation(int index) {
  std::lock_guard<std::mutex> lock(state().lock);
  return state().violations.at(index).c_str();
}
