// Counts of messages.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace mykv {

// What was sent to or received from other hosts. Any thread may read it.
struct Traffic {
  void add(size_t some) {
    messages.fetch_add(1, std::memory_order_relaxed);
    bytes.fetch_add(some, std::memory_order_relaxed);
  }
  std::atomic<uint64_t> messages{0};
  std::atomic<uint64_t> bytes{0};
};

}  // namespace mykv
