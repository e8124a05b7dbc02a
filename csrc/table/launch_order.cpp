#include "table/launch_order.h"

#include <algorithm>

#include "base/error.h"

namespace mykv {

namespace {
constexpr int64_t kPatienceUs = 5000000;  // the lock is held for nanoseconds
}

size_t LaunchOrder::bytes(int local_size) {
  return (sizeof(LaunchOrder) + sizeof(uint64_t) * static_cast<size_t>(local_size) + 63) / 64 * 64;
}

void LaunchOrder::init(int local_size) {
  mutex_.init();
  std::fill_n(last(), local_size, uint64_t{0});
}

void LaunchOrder::lock() {
  const SharedMutex::Result result = mutex_.try_lock(kPatienceUs);
  if (result == SharedMutex::Result::taken) return;
  if (result == SharedMutex::Result::inherited) mutex_.unlock();
  throw Error(result == SharedMutex::Result::busy ? "a rank of this host keeps the order of launches on GPUs locked"
                                                  : "a rank of this host has died while it ordered launches on GPUs",
              ErrorCode::table_locked);
}

}  // namespace mykv
