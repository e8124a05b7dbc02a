#include "table/launch_order.h"

#include <algorithm>

#include "base/error.h"

namespace mykv {

size_t LaunchOrder::bytes(int local_size) {
  return (sizeof(LaunchOrder) + sizeof(uint64_t) * static_cast<size_t>(local_size) + 63) / 64 * 64;
}

void LaunchOrder::init(int local_size) {
  mutex_.init();
  std::fill_n(last(), local_size, uint64_t{0});
}

bool LaunchOrder::lock(int64_t patience_us, int label) {
  const SharedMutex::Result result = mutex_.try_lock(patience_us);
  if (result == SharedMutex::Result::taken) {
    holder_.store(label + 1, std::memory_order_relaxed);
    return true;
  }
  if (result == SharedMutex::Result::busy) return false;
  if (result == SharedMutex::Result::inherited) mutex_.unlock();  // no rank can lock the mutex from now on
  throw Error(holder() + " has died while it ordered launches on GPUs", ErrorCode::table_locked);
}

void LaunchOrder::unlock() {
  holder_.store(0, std::memory_order_relaxed);
  mutex_.unlock();
}

std::string LaunchOrder::holder() const {
  const int label = holder_.load(std::memory_order_relaxed) - 1;
  return label < 0 ? "a rank of this host" : "rank " + std::to_string(label);
}

}  // namespace mykv
