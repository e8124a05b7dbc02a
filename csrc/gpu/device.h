// Devices, streams and events, as RAII objects. No call here blocks on a GPU.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <vector>

#include "base/forks.h"
#include "gpu/libraries.h"

namespace mykv::gpu {

// Makes a device the current device of this thread until the end of the scope.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// A point in a stream. Events are reused from a store per device, since creating an event takes longer than recording
// it.
class Event {
 public:
  // The event has happened when all earlier work of the stream has. `stream` belongs to `device`; null: the legacy
  // default stream.
  static std::shared_ptr<const Event> record(int device, CudaStream stream);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  int device() const { return device_; }
  CudaEvent get() const { return event_; }
  // Never blocks. Throws Error if the device has failed.
  bool happened() const;

 private:
  Event(int device, CudaEvent event) : device_(device), event_(event) {}

  int device_;
  CudaEvent event_;
  const uint32_t forks_ = fork_number();
};

// A stream of the core, with the highest priority of its device, since other ranks wait for its work.
class Stream {
 public:
  explicit Stream(int device);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  int device() const { return device_; }
  CudaStream get() const { return stream_; }
  // Work added from now on begins after the event.
  void wait(const Event& event);
  std::shared_ptr<const Event> record() { return Event::record(device_, stream_); }

 private:
  int device_;
  CudaStream stream_ = nullptr;
};

// Copies between GPUs and host memory in the core's own streams, one per device and direction, so that both directions
// run at once. No call blocks.

// Copies that were begun together.
class Copies {
 public:
  // Whether all copies are complete. `late`: devices known to have incomplete earlier copies in the same streams. The
  // function does not query these devices again, and adds further such devices. Throws Error if a device has failed.
  bool happened(std::vector<int>* late);

 private:
  friend class CopyStreams;
  std::vector<std::shared_ptr<const Event>> under_way_;
};

// Not thread-safe.
class CopyStreams {
 public:
  // Enqueues a copy in the stream of `device`, which holds one of the addresses. Throws Error if CUDA fails.
  void copy(int device, void* to, const void* from, size_t bytes);
  // All copies since the last successful call. Throws Error if they cannot be tracked; they may still run.
  Copies begun();
  // Drops all copies that are not tracked yet.
  void forget() { used_.clear(); }

 private:
  std::map<int, std::unique_ptr<Stream>> streams_;
  std::vector<int> used_;  // devices with copies that are not tracked yet
};

// Throws Error unless this address is on this device.
void require_on_device(const void* address, int device);

}  // namespace mykv::gpu
