#include "transport/nccl/launch_order.h"

#include <mutex>

#include "base/error.h"
#include "operations/operation.h"

namespace mykv {

namespace {

constexpr uint64_t kForgone = ~uint64_t{0};
// Longest wait for the launch order, which a rank normally locks only for nanoseconds, while the table's lock is held.
constexpr int64_t kWaitUs = 50;

}  // namespace

LaunchOrder& LaunchOrder::in(const HostTable& table) {
  static_assert(sizeof(LaunchOrder) <= HostTable::kTransportBytes);
  return *static_cast<LaunchOrder*>(table.transport_memory());
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

LaunchNumbers::LaunchNumbers(HostTable& table, LaunchOrder& order, std::vector<int> ranks)
    : table_(table), order_(order), ranks_(std::move(ranks)) {
  table.set_hook(*this);
}

uint64_t LaunchNumbers::placement(Entry& entry) const {
  uint64_t digest = 0;
  for (int r = 0; r < table_.local_size(); ++r) {
    digest = hash_bytes(&entry.records()[r].placement, sizeof(uint64_t), digest);
  }
  return digest;
}

bool LaunchNumbers::make_ready(Entry& entry, bool tries_again) {
  if (!order_.lock(kWaitUs, table_.ranks()[static_cast<size_t>(table_.local_rank())])) {
    if (tries_again) return false;
    throw Error("the order of launches on GPUs is kept locked by " + order_.holder() +
                    ", which does not respond (is it stopped?)",
                ErrorCode::table_locked);
  }
  const std::lock_guard<LaunchOrder> guard(order_, std::adopt_lock);
  for (size_t r = 0; r < ranks_.size(); ++r) {
    uint64_t& launch = entry.records()[r].launch;
    if (launch != kForgone) launch = order_.next(ranks_[r]);
  }
  return true;
}

uint64_t LaunchNumbers::forgo(uint32_t index) {
  return table_.lock().run([&] {
    uint64_t& launch = mine(index);
    return launch != 0 ? launch : (launch = kForgone, uint64_t{0});
  });
}

uint64_t LaunchNumbers::given(uint32_t index) const {
  const uint64_t launch = mine(index);
  return launch == kForgone ? 0 : launch;
}

}  // namespace mykv
