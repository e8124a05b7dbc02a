// The lock of the shared table. Every wait for it has a time limit in its caller.
#pragma once

#include <pthread.h>

#include <cstdint>

namespace mykv {

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
