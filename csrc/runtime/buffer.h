// Memory in the host's segment that belongs to one rank and outlives single operations: what requests in place work on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

namespace mykv {

class Runtime;

// Memory in the host's segment that belongs to this rank. It keeps the segment mapped.
class Buffer {
 public:
  Buffer(std::shared_ptr<Runtime> runtime, uint64_t offset, size_t bytes)
      : runtime_(std::move(runtime)), offset_(offset), bytes_(bytes) {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();

  const std::shared_ptr<Runtime>& runtime() const { return runtime_; }
  char* data() const;
  // Takes memory for the first `bytes` bytes, zeroed; throws Error when there is none left. Any thread.
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
