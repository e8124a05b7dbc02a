// Memory on one GPU that a trainer's gradients share.
#pragma once

#include <unistd.h>

#include <cstddef>

namespace mykv::gpu {

class Memory {
 public:
  // Zeroed. Throws Error, with CUDA's error name, if the GPU has no memory left.
  Memory(int device, size_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // From now on, if this thread drops the last reference to memory, another thread frees it: cudaFree waits for all
  // work of the GPU.
  static void free_elsewhere();

  int device() const { return device_; }
  void* address() const { return address_; }
  size_t bytes() const { return bytes_; }

 private:
  const pid_t process_ = getpid();
  int device_;
  size_t bytes_;
  void* address_ = nullptr;
};

}  // namespace mykv::gpu
