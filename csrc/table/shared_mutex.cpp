#include "table/shared_mutex.h"

#include <unistd.h>

#include <cerrno>
#include <ctime>

#include "base/clock.h"
#include "base/error.h"

// Since glibc 2.30; ThreadSanitizer does not see it.
#if defined(__GLIBC__) && !defined(__SANITIZE_THREAD__)
#if __GLIBC_PREREQ(2, 30)
#define MYKV_CLOCKLOCK
#endif
#endif

namespace mykv {

namespace {
#ifndef MYKV_CLOCKLOCK
constexpr useconds_t kPollUs = 200;  // between two looks at a mutex
#endif

SharedMutex::Result result_of(int failed) {
  switch (failed) {
    case 0:
      return SharedMutex::Result::taken;
    case EBUSY:
    case ETIMEDOUT:
      return SharedMutex::Result::busy;
    case EOWNERDEAD:
      return SharedMutex::Result::inherited;
    default:
      return SharedMutex::Result::unusable;
  }
}
}  // namespace

void SharedMutex::init() {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  const int failed = pthread_mutex_init(&mutex_, &attributes);
  pthread_mutexattr_destroy(&attributes);
  if (failed != 0) throw Error("mykv cannot make a lock in shared memory");
}

SharedMutex::Result SharedMutex::try_lock() { return result_of(pthread_mutex_trylock(&mutex_)); }

SharedMutex::Result SharedMutex::try_lock(int64_t timeout_us) {
  // Not pthread_mutex_timedlock, whose clock may be set back, which would stretch the wait.
  const int64_t until_ns = now_ns() + timeout_us * 1000;
#ifdef MYKV_CLOCKLOCK
  const timespec until{until_ns / 1000000000, until_ns % 1000000000};
  return result_of(pthread_mutex_clocklock(&mutex_, CLOCK_MONOTONIC, &until));
#else
  for (;;) {
    const Result result = try_lock();
    if (result != Result::busy || now_ns() >= until_ns) return result;
    usleep(kPollUs);
  }
#endif
}

}  // namespace mykv
