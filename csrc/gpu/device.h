// Devices, streams and events, as objects that clean up after themselves. None of these waits for a GPU.
#pragma once

#include <memory>

#include "gpu/cuda_api.h"

namespace mykv::gpu {

// The current device of this thread, until the end of the scope.
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

// A moment in a stream. Events are taken from a store per device, since making one takes longer than recording it.
class Event {
 public:
  // What was put into the stream before has happened when this one has. `stream` is of that device; null: the legacy
  // default stream.
  static std::shared_ptr<const Event> record(int device, CudaStream stream);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  int device() const { return device_; }
  CudaEvent get() const { return event_; }
  // Never waits. Throws Error when the device has failed.
  bool happened() const;

 private:
  Event(int device, CudaEvent event) : device_(device), event_(event) {}

  int device_;
  CudaEvent event_;
};

// A stream of our own, with the highest priority of its device: what other ranks wait for goes first.
class Stream {
 public:
  explicit Stream(int device);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  int device() const { return device_; }
  CudaStream get() const { return stream_; }
  // What is put in from now on begins after the event.
  void wait(const Event& event);
  std::shared_ptr<const Event> record() { return Event::record(device_, stream_); }

 private:
  int device_;
  CudaStream stream_ = nullptr;
};

}  // namespace mykv::gpu
