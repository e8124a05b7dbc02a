#include "runtime/buffer.h"

#include <algorithm>
#include <utility>

namespace mykv {

Buffer::Buffer(std::shared_ptr<Runtime> runtime, size_t bytes)
    : runtime_(std::move(runtime)), offset_(runtime_->region().reserve(bytes)), bytes_(bytes) {}

Buffer::~Buffer() {
  // A forked child shares the segment: releasing memory in the child would take it from its parent.
  if (!runtime_->forked()) runtime_->region().release_reserved(offset_, bytes_);
}

char* Buffer::data() const { return runtime_->world().segment().base() + offset_; }

void Buffer::commit(size_t bytes) {
  runtime_->require_own_process();
  constexpr size_t kStep = size_t{64} << 10;  // fewer calls when small arrays fill a bucket one at a time
  std::lock_guard<std::mutex> lock(mutex_);
  if (bytes <= committed_) return;
  const size_t to = std::max(bytes, std::min(bytes_, (bytes + kStep - 1) / kStep * kStep));
  runtime_->region().commit(offset_ + committed_, to - committed_);
  committed_ = to;
}

}  // namespace mykv
