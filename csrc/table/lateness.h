// How often a rank came last to an operation, and how long the other ranks had waited for it. One object for each rank
// lies in the host's shared memory, so that any rank of the host can tell who is slow without a message.
#pragma once

#include <atomic>
#include <cstdint>

namespace mykv {

// Written under the table's lock only, and read without it: so each number is right, and two numbers may be of
// different moments.
struct alignas(64) Lateness {
  struct Count {
    // `waited_ns`: the mean over the ranks that waited.
    void add(int64_t waited_ns) {
      times.store(times.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
      nanoseconds.store(nanoseconds.load(std::memory_order_relaxed) + waited_ns, std::memory_order_relaxed);
    }
    std::atomic<uint64_t> times{0};
    std::atomic<int64_t> nanoseconds{0};
  };
  void add(int64_t waited_ns, bool ends_step) {
    operations.add(waited_ns);
    if (ends_step) steps.add(waited_ns);
  }
  Count operations;
  Count steps;  // only operations that are StepPart::last
};

// A copy, for readers.
struct LateRank {
  LateRank(int label, const Lateness& of)
      : rank(label),
        operations(of.operations.times.load(std::memory_order_relaxed)),
        operations_ns(of.operations.nanoseconds.load(std::memory_order_relaxed)),
        steps(of.steps.times.load(std::memory_order_relaxed)),
        steps_ns(of.steps.nanoseconds.load(std::memory_order_relaxed)) {}

  int rank;
  uint64_t operations;
  int64_t operations_ns;
  uint64_t steps;
  int64_t steps_ns;
};

}  // namespace mykv
