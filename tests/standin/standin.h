// What the stand-in for libcudart offers to tests (by ctypes) and to the stand-in for libnccl (by dlsym), beside CUDA's
// own functions. Plain C, so that a test can call all of it. Devices are numbers of this process.
#pragma once

#include <cstddef>

#define STANDIN_API extern "C" __attribute__((visibility("default")))

// Work in a stream, in its order: `function` runs on the stream's thread and may block; 0 means done, anything else
// stops the stream as the loss of its device does. A null stream is the legacy default stream of `device`. CUDA's
// error.
STANDIN_API int standin_enqueue(int device, void* stream, int (*function)(void*), void* argument);
// What stands in for a kernel that takes its time: a pause in the stream.
STANDIN_API int standin_delay(int device, void* stream, unsigned microseconds);
// Let what comes into stream `after` wait for all that is in stream `before`, as an event would.
STANDIN_API int standin_order(int device, void* before, void* after);
// A pointer that host code may use for device memory (or registered memory); null where it is neither.
STANDIN_API void* standin_alias(const void* pointer);
// Device of device memory; -1 for registered memory, -2 for what CUDA does not know.
STANDIN_API int standin_device_of(const void* pointer);
// Bytes from `pointer` to the end of its allocation or registration; 0 for what CUDA does not know.
STANDIN_API size_t standin_extent(const void* pointer);
// Device of a stream, -1 for the default streams (which belong to every device), -2 if there is no such stream.
STANDIN_API int standin_stream_device(void* stream);
STANDIN_API int standin_current_device(void);
STANDIN_API const char* standin_bus_id(int device);
// Error that a device has been lost with; 0 while it works.
STANDIN_API int standin_device_error(int device);

// Let the `nth` call from now (1 is the next) of a function of CUDA return `code` and do nothing.
STANDIN_API void standin_plant(const char* function, int nth, int code);
// From now on calls on this device return `code` (719 and 46 are what lost devices give), and its streams stop.
STANDIN_API void standin_lose_device(int device, int code);
// Let a stream (null: all streams of the device) stop before its next operation, and go on. CUDA's error.
STANDIN_API int standin_hold(int device, void* stream, int on);
// Calls of a function of CUDA so far in this process.
STANDIN_API long standin_calls(const char* function);
// Bytes of device memory that are allocated.
STANDIN_API size_t standin_allocated(int device);
// Streams and events that were made and not destroyed, and ranges of registered host memory.
STANDIN_API int standin_live_streams(void);
STANDIN_API int standin_live_events(void);
STANDIN_API int standin_registered(void);
// What was done that a real machine would punish later or elsewhere: written to stderr, counted, and kept.
STANDIN_API void standin_violate(const char* text);
STANDIN_API int standin_violations(void);
STANDIN_API const char* standin_violation(int index);
