#include "transport/nccl/launcher.h"

#include <algorithm>

#include "base/error.h"
#include "base/forks.h"
#include "gpu/libraries.h"

namespace mykv {

namespace {

struct Current {
  std::mutex mutex;
  std::weak_ptr<Launcher> launcher;
};

Current& the_current() { return usable_in_forks<Current>(); }

}  // namespace

std::shared_ptr<Launcher> Launcher::begin(LaunchOrder& order, std::vector<int> ranks) {
  const std::shared_ptr<Launcher> made(new Launcher(order, std::move(ranks)));
  std::lock_guard<std::mutex> lock(the_current().mutex);
  the_current().launcher = made;
  return made;
}

std::shared_ptr<Launcher> Launcher::current() {
  std::lock_guard<std::mutex> lock(the_current().mutex);
  return the_current().launcher.lock();
}

// When this runs, the groups have finished all operations in the streams, or given them up.
Launcher::~Launcher() {
  if (kept_ || process_ != getpid()) {
    for (auto& [number, one] : devices_) (void)one.stream.release();
    return;
  }
  for (auto& [number, one] : devices_) {
    try {
      const gpu::DeviceScope scope(number);
      for (void* block : one.blocks) gpu::cuda().free(block);
    } catch (const Error&) {
      // The GPU has failed, and its memory is gone.
    }
  }
}

std::vector<int> Launcher::local_ranks(const std::vector<int>& ranks) const {
  std::vector<int> found;
  for (const int rank : ranks) {
    const auto at = std::find(ranks_.begin(), ranks_.end(), rank);
    if (at == ranks_.end()) return {};
    found.push_back(static_cast<int>(at - ranks_.begin()));
  }
  return found;
}

bool Launcher::is_turn(uint64_t number, Bell& bell) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (number == next_) return true;
  waiting_[number] = &bell;
  return false;
}

void Launcher::release(uint64_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  waiting_.erase(number);
  if (number < next_) return;
  released_.insert(number);
  while (!released_.empty() && *released_.begin() == next_) {
    released_.erase(released_.begin());
    ++next_;
  }
  const auto next = waiting_.find(next_);
  if (next != waiting_.end()) next->second->ring();
}

Launcher::Device& Launcher::device(int number) {
  Device& one = devices_[number];
  if (!one.stream) one.stream = std::make_unique<gpu::Stream>(number);
  return one;
}

gpu::Stream& Launcher::stream(int number) {
  std::lock_guard<std::mutex> lock(mutex_);
  return *device(number).stream;
}

void Launcher::reserve(int number, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  Device& one = device(number);
  if (bytes <= one.bytes) return;
  size_t taken = std::max(bytes, 2 * one.bytes);
  const gpu::Cuda& api = gpu::cuda();
  const gpu::DeviceScope scope(number);
  void* block = nullptr;
  int code = api.malloc(&block, taken);
  if (code != gpu::Cuda::kSuccess && taken > bytes) {
    api.get_last_error();
    taken = bytes;
    code = api.malloc(&block, taken);
  }
  if (code != gpu::Cuda::kSuccess) api.get_last_error();
  api.check(code, "cudaMalloc");
  one.blocks.push_back(block);
  one.bytes = taken;
}

char* Launcher::scratch(int number, size_t bytes) {
  reserve(number, bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<char*>(device(number).blocks.back());
}

}  // namespace mykv
