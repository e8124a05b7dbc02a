// Stand-in for libmxnet: the few functions that the bridge calls (csrc/mxnet/api.h), and those of NDArray's methods
// that read an array, for arrays that say that they are on GPUs, which MXNet's builds without CUDA cannot make. No
// header of MXNet's is used. What follows is for tests.
#pragma once

#include <cstddef>
#include <cstdint>

#define STANDIN_API extern "C" __attribute__((visibility("default")))

// A new array over this memory, which stays the caller's. device_type: 1 is the CPU, 2 a GPU.
STANDIN_API void* standin_mx_array(void* data, int device_type, int device, int dtype, int dimensions,
                                   const int64_t* shape);
// Waits until no operation on the array is under way: 0, -1 after that many seconds, or 1 where its last one has failed
// (then the text is in `error`, which holds so many bytes).
STANDIN_API int standin_mx_wait(void* array, double seconds, char* error, size_t bytes);
// Puts an error into the array, as a failed operation would.
STANDIN_API void standin_mx_spoil(void* array, const char* error);
// From now on operations are called as this release of MXNet calls them, and what 2.0's on_start does; null: nothing.
STANDIN_API void standin_mx_release(int major, void (*on_start)());
// The next operation is not taken: 1 before the engine has made anything of it, 2 after, when its deleter is run.
STANDIN_API void standin_mx_fail_to_push(int how);
// FnProperty and device type of the last operation that was pushed.
STANDIN_API int standin_mx_last_property();
STANDIN_API int standin_mx_last_device_type();
// How often an operation ended with an error while another one did so on another thread, which the engine does not
// bear.
STANDIN_API int standin_mx_errors_at_once();
// Operations that were pushed and whose deleter has not run; handles that were not freed.
STANDIN_API int standin_mx_operations();
STANDIN_API int standin_mx_handles();
