// Sleeping and waking across processes, and the lock of the shared table. All of it works on plain words in shared
// memory, so every wait here has a time limit in its caller and a dead rank is noticed instead of waited for.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace mykv {

// Wakes the runtime thread of one rank. ring() is cheap when that thread is awake.
class Bell {
 public:
  uint32_t count() const { return count_.load(std::memory_order_seq_cst); }
  void ring();
  // Sleeps until ring() came after `seen` was read, or the time is over.
  void wait(uint32_t seen, int64_t timeout_us);

 private:
  std::atomic<uint32_t> count_{0};
  std::atomic<uint32_t> sleeping_{0};
};

// A mutex between processes; robust, so that the death of its holder is told and no hang.
class SharedMutex {
 public:
  enum class Result {
    taken,
    busy,
    inherited,  // its holder has died in it; the lock is ours, and of no use to anybody from unlock() on
    unusable,   // that has happened before
  };
  void init();
  Result try_lock();
  Result try_lock(int64_t timeout_us);  // busy: somebody else held it all that time
  void unlock() { pthread_mutex_unlock(&mutex_); }

 private:
  pthread_mutex_t mutex_;
};

}  // namespace mykv
