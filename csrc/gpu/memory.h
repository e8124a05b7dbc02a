// Memory on one GPU that a trainer's gradients share.
#pragma once

#include <cstddef>

namespace mykv::gpu {

class Memory {
 public:
  // Zeroed. Throws Error, with CUDA's name of it, when the GPU has no memory left.
  Memory(int device, size_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  int device() const { return device_; }
  void* address() const { return address_; }
  size_t bytes() const { return bytes_; }

 private:
  int device_;
  size_t bytes_;
  void* address_ = nullptr;
};

}  // namespace mykv::gpu
