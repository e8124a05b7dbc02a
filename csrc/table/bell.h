// Sleeping and waking across processes, on futex words in shared memory. Every caller gives a time limit, so that it
// notices a dead rank instead of waiting for it.
#pragma once

#include <atomic>
#include <cstdint>

namespace mykv {

// Wakes the thread that advances one rank's requests: the runtime's thread, or a thread that waits for a request and
// stands in for it. ring() is cheap when that thread is awake. Its callers:
//   HostTable::ring()     a rank that has changed the table for other ranks, after it has released the lock
//   Runtime, Parts        this rank's threads that post requests, leave, give up or break down
//   RuntimeThread         a stand-in that returns the loop
//   TableLock             a rank that gives a verdict on the table
// Messages of other hosts ring no bell: the thread looks for them when its sleep ends.
class Bell {
 public:
  enum class Sleeper : uint32_t { thread = 1, stand_in = 2 };

  uint32_t count() const { return count_.load(std::memory_order_seq_cst); }
  void ring();
  // Sleeps until ring() is called after count() has returned `seen`, or until the time limit.
  void wait(uint32_t seen, int64_t timeout_us, Sleeper sleeper = Sleeper::thread);
  // on: ring() wakes the stand-in. off: the runtime's thread.
  void stand_in(bool on);

 private:
  static constexpr uint32_t kHasStandIn = 4;

  std::atomic<uint32_t> count_{0};
  std::atomic<uint32_t> state_{0};  // a bit for each Sleeper that sleeps, and kHasStandIn
};

}  // namespace mykv
