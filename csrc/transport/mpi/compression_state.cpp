#include "transport/mpi/compression_state.h"

#include "base/error.h"

namespace mykv {

char* CompressionState::residual(size_t element, size_t slice) {
  if (!compressor_.feedback()) return nullptr;
  const size_t width = item_size(dtype_);
  if (residual_ == nullptr) {
    residual_.reset(static_cast<char*>(std::calloc(slice, width)));  // pages are not committed before they are written
    if (residual_ == nullptr)
      throw Error("there is no memory for the residual of the compression", ErrorCode::no_memory);
  }
  return residual_.get() + element * width;
}

std::shared_ptr<CompressionState> CompressionStates::of(const std::string& name, size_t part,
                                                        const Operation& operation, size_t total) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& parts = states_[name];
  if (parts.size() <= part) parts.resize(part + 1);
  std::shared_ptr<CompressionState>& state = parts[part];
  if (!state || !state->is_of(operation, total)) {
    state = std::make_shared<CompressionState>(*operation.compressor, operation.dtype, operation.count, total,
                                               make_key(name, 0, part).high);
  }
  return state;
}

void CompressionStates::forget(const std::string& prefix) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto it = states_.lower_bound(prefix);
  while (it != states_.end() && it->first.compare(0, prefix.size(), prefix) == 0) it = states_.erase(it);
}

}  // namespace mykv
