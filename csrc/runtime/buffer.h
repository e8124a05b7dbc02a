// Memory in the host's segment for requests in place. It belongs to one rank and outlives single operations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "runtime/runtime.h"

namespace mykv {

// Keeps the runtime and with it the segment mapped while it lives.
class Buffer {
 public:
  // Addresses only; commit() puts memory behind them.
  Buffer(std::shared_ptr<Runtime> runtime, size_t bytes);
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();

  const std::shared_ptr<Runtime>& runtime() const { return runtime_; }
  char* data() const;
  // Commits memory for the first `bytes` bytes, zeroed; throws Error when there is no memory left. Thread-safe.
  void commit(size_t bytes);
  uint64_t offset() const { return offset_; }
  size_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<Runtime> runtime_;
  uint64_t offset_;
  size_t bytes_;
  std::mutex mutex_;
  size_t committed_ = 0;
};

}  // namespace mykv
