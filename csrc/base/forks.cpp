#include "base/forks.h"

#include <pthread.h>

#include <atomic>

namespace mykv {

namespace {

std::atomic<uint32_t> g_forks{0};

// vfork() and posix_spawn() do not call this handler. Their children need no new number, since they run another program
// at once.
const int g_registered = pthread_atfork(nullptr, nullptr, [] { g_forks.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

uint32_t fork_number() {
  static_cast<void>(g_registered);
  return g_forks.load(std::memory_order_relaxed);
}

}  // namespace mykv
