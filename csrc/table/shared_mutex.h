// The mutex of the shared table. Every caller gives a time limit.
#pragma once

#include <pthread.h>

#include <cstdint>

namespace mykv {

// A mutex between processes; robust, so that the death of its holder is reported instead of a deadlock.
class SharedMutex {
 public:
  enum class Result {
    taken,
    busy,
    inherited,  // its holder has died; this thread has the mutex, and from unlock() on it is unusable
    unusable,   // a holder has died earlier
  };
  void init();
  Result try_lock();
  Result try_lock(int64_t timeout_us);  // busy: the mutex was not free in that time
  void unlock() { pthread_mutex_unlock(&mutex_); }

 private:
  pthread_mutex_t mutex_;
};

}  // namespace mykv
