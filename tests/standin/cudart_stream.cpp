// Streams: each is a thread that runs its operations in order, every one after a pause of its own, so that streams
// overtake each other. Events are places in streams.
#include <unistd.h>

#include <thread>

#include "cudart.h"

namespace standin {
namespace {

bool reached(const Point& point) { return !point.stream || point.stream->completed >= point.sequence; }

bool stopped(const Stream& stream) { return stream.lost || device_error(stream.device) != kSuccess; }

bool ready(const Stream& stream) {
  if (stream.queue.empty() || stream.held || stopped(stream)) return false;
  for (const Point& point : stream.queue.front().after)
    if (!reached(point)) return false;
  return true;
}

useconds_t pause_of(Stream& stream) {
  static const long bound = setting("STANDIN_DELAY_US", 100);
  return bound > 0 ? static_cast<useconds_t>(stream.random() % static_cast<unsigned long>(bound + 1)) : 0;
}

void run(const std::shared_ptr<Stream>& stream, Lock& lock) {
  State& all = state();
  while (true) {
    all.changed.wait(
        lock, [&] { return ready(*stream) || (stream->destroyed && (stream->queue.empty() || stopped(*stream))); });
    if (!ready(*stream)) return;
    Operation& operation = stream->queue.front();
    useconds_t pause = pause_of(*stream);
    stream->running = true;
    lock.unlock();
    if (pause) usleep(pause);
    int failed = operation.run ? operation.run() : 0;
    lock.lock();
    stream->running = false;
    if (failed || stopped(*stream)) {  // never done: those who wait see the error of the device, or wait on
      all.changed.notify_all();
      all.changed.wait(lock, [&] { return stream->destroyed; });
      return;
    }
    stream->queue.pop_front();
    ++stream->completed;
    all.changed.notify_all();
  }
}

void work(std::shared_ptr<Stream> stream) {
  Lock lock(state().lock);
  run(stream, lock);
  state().ending.erase(stream);
  state().changed.notify_all();
}

std::shared_ptr<Stream> start(int device, bool blocking) {
  auto stream = std::make_shared<Stream>();
  stream->device = device;
  stream->blocking = blocking;
  stream->random.seed(static_cast<unsigned>(setting("STANDIN_SEED", 0) * 7919 + state().streams_made++));
  std::thread(work, stream).detach();
  return stream;
}

bool is_legacy(const void* handle) { return !handle || handle == reinterpret_cast<void*>(1); }

std::shared_ptr<Stream> legacy(int device) {
  std::shared_ptr<Stream>& stream = state().devices[device].legacy;
  if (!stream) stream = start(device, true);
  return stream;
}

// Of one device, also those that were destroyed and still run.
std::vector<std::shared_ptr<Stream>> streams_of(int device) {
  std::vector<std::shared_ptr<Stream>> found;
  for (const auto* streams : {&state().streams, &state().ending})
    for (const auto& stream : *streams)
      if (stream->device == device) found.push_back(stream);
  if (state().devices.at(device).legacy) found.push_back(state().devices[device].legacy);
  return found;
}

Point tail(const std::shared_ptr<Stream>& stream) { return {stream, stream->submitted}; }

int create(void** handle, unsigned flags) {
  if (!handle || flags > 1) return kInvalidValue;
  Lock lock(state().lock);
  auto stream = start(current_device, flags == 0);
  state().streams.insert(stream);
  *handle = stream.get();
  return kSuccess;
}

Event* find_event(void* handle) {
  auto found = state().events.find(handle);
  if (found != state().events.end()) return found->second.get();
  violate("use of an event that does not exist");
  return nullptr;
}

}  // namespace

std::shared_ptr<Stream> find_stream(void* handle, int device) {
  if (is_legacy(handle)) return legacy(device);
  for (const auto& stream : state().streams)
    if (stream.get() == handle) return stream;
  violate("use of a stream that does not exist");
  return nullptr;
}

int submit(const std::shared_ptr<Stream>& stream, Operation operation) {
  int error = device_error(stream->device);
  if (error != kSuccess) return error;
  std::shared_ptr<Stream>& first = state().devices[stream->device].legacy;
  if (stream == first) {
    for (const auto& other : state().streams)
      if (other->device == stream->device && other->blocking) operation.after.push_back(tail(other));
  } else if (first && stream->blocking) {
    operation.after.push_back(tail(first));
  }
  stream->queue.push_back(std::move(operation));
  ++stream->submitted;
  state().changed.notify_all();
  return kSuccess;
}

int wait_for(Lock& lock, const Point& point) {
  int device = point.stream->device;
  state().changed.wait(lock, [&] { return reached(point) || device_error(device) != kSuccess; });
  return device_error(device);
}

int wait_for_device(Lock& lock, int device) {
  std::vector<Point> points;
  for (const auto& stream : streams_of(device))
    if (!stream->lost) points.push_back(tail(stream));
  for (const Point& point : points) wait_for(lock, point);
  return device_error(device);
}

// A device that was lost begins anew: what its streams had not done is dropped, and is not under way either when this
// returns, so that memory can be given back. What an operation of NCCL's waits for is not waited for.
void revive(Lock& lock, int device) {
  for (const auto& stream : streams_of(device)) {
    if (stream->queue.empty()) continue;
    stream->lost = true;
    state().changed.wait(lock, [&] { return !stream->running || !stream->queue.front().memory; });
  }
  std::shared_ptr<Stream>& first = state().devices.at(device).legacy;
  if (first && first->lost) {
    first->destroyed = true;
    first.reset();
  }
}

}  // namespace standin

using namespace standin;

STANDIN_API int cudaStreamCreateWithFlags(void** handle, unsigned flags) {
  return called(__func__, true, [&] { return create(handle, flags); });
}

STANDIN_API int cudaStreamCreateWithPriority(void** handle, unsigned flags, int) {
  return called(__func__, true, [&] { return create(handle, flags); });
}

STANDIN_API int cudaStreamDestroy(void* handle) {
  return called(__func__, true, [&]() -> int {
    Lock lock(state().lock);
    if (is_legacy(handle)) return kInvalidResourceHandle;
    auto stream = find_stream(handle, current_device);
    if (!stream) return kInvalidResourceHandle;
    stream->destroyed = true;  // what is in it still runs
    state().ending.insert(stream);
    state().streams.erase(stream);
    state().changed.notify_all();
    return kSuccess;
  });
}

STANDIN_API int cudaStreamSynchronize(void* handle) {
  return called(__func__, true, [&]() -> int {
    Lock lock(state().lock);
    auto stream = find_stream(handle, current_device);
    return stream ? wait_for(lock, tail(stream)) : static_cast<int>(kInvalidResourceHandle);
  });
}

STANDIN_API int cudaStreamQuery(void* handle) {
  return called(__func__, true, [&]() -> int {
    Lock lock(state().lock);
    auto stream = find_stream(handle, current_device);
    if (!stream) return kInvalidResourceHandle;
    int error = device_error(stream->device);
    return error != kSuccess ? error : reached(tail(stream)) ? kSuccess : kNotReady;
  });
}

STANDIN_API int cudaStreamWaitEvent(void* handle, void* event_handle, unsigned flags) {
  return called(__func__, true, [&]() -> int {
    if (flags > 1) return kInvalidValue;
    Lock lock(state().lock);
    auto stream = find_stream(handle, current_device);
    Event* event = find_event(event_handle);
    if (!stream || !event) return kInvalidResourceHandle;
    Operation operation;
    operation.after.push_back(event->last);  // the most recent record now; later ones do not matter
    return submit(stream, std::move(operation));
  });
}

STANDIN_API int cudaEventCreateWithFlags(void** handle, unsigned flags) {
  return called(__func__, true, [&]() -> int {
    if (!handle || flags > 7) return kInvalidValue;
    auto event = std::make_unique<Event>();
    event->device = current_device;
    *handle = event.get();
    Lock lock(state().lock);
    state().events[*handle] = std::move(event);
    return kSuccess;
  });
}

STANDIN_API int cudaEventRecord(void* event_handle, void* handle) {
  return called(__func__, true, [&]() -> int {
    Lock lock(state().lock);
    auto stream = find_stream(handle, current_device);
    Event* event = find_event(event_handle);
    if (!stream || !event || event->device != stream->device) return kInvalidResourceHandle;
    int error = submit(stream, {});
    if (error == kSuccess) event->last = tail(stream);
    return error;
  });
}

STANDIN_API int cudaEventQuery(void* handle) {
  return called(__func__, true, [&]() -> int {
    Lock lock(state().lock);
    Event* event = find_event(handle);
    if (!event) return kInvalidResourceHandle;
    int error = device_error(event->device);
    return error != kSuccess ? error : reached(event->last) ? kSuccess : kNotReady;
  });
}

STANDIN_API int cudaEventDestroy(void* handle) {
  return called(__func__, true, [&]() -> int {
    Lock lock(state().lock);
    if (!find_event(handle)) return kInvalidResourceHandle;
    state().events.erase(handle);
    return kSuccess;
  });
}

STANDIN_API int cudaDeviceSynchronize(void) {
  return called(__func__, true, [&] {
    Lock lock(state().lock);
    return wait_for_device(lock, current_device);
  });
}

STANDIN_API int standin_enqueue(int device, void* handle, int (*function)(void*), void* argument) {
  Lock lock(state().lock);
  auto stream = find_stream(handle, device);
  if (!stream || stream->device != device) return kInvalidResourceHandle;
  Operation operation;
  operation.run = [function, argument] { return function(argument); };
  return submit(stream, std::move(operation));
}

STANDIN_API int standin_delay(int device, void* handle, unsigned microseconds) {
  Lock lock(state().lock);
  auto stream = find_stream(handle, device);
  if (!stream) return kInvalidResourceHandle;
  Operation operation;
  operation.run = [microseconds] { return usleep(microseconds), 0; };
  return submit(stream, std::move(operation));
}

STANDIN_API int standin_order(int device, void* before, void* after) {
  Lock lock(state().lock);
  auto first = find_stream(before, device), second = find_stream(after, device);
  if (!first || !second) return kInvalidResourceHandle;
  Operation operation;
  operation.after.push_back(tail(first));
  return submit(second, std::move(operation));
}

STANDIN_API int standin_stream_device(void* handle) {
  if (is_legacy(handle)) return -1;
  Lock lock(state().lock);
  auto stream = find_stream(handle, current_device);
  return stream ? stream->device : -2;
}

STANDIN_API int standin_hold(int device, void* handle, int on) {
  Lock lock(state().lock);
  if (handle) {
    auto stream = find_stream(handle, device);
    if (!stream) return kInvalidResourceHandle;
    stream->held = on;
  } else {
    legacy(device);
    for (const auto& stream : streams_of(device)) stream->held = on;
  }
  state().changed.notify_all();
  return kSuccess;
}

STANDIN_API int standin_live_streams(void) {
  Lock lock(state().lock);
  return static_cast<int>(state().streams.size());
}

STANDIN_API int standin_live_events(void) {
  Lock lock(state().lock);
  return static_cast<int>(state().events.size());
}
