#include "runtime/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>

#include "runtime/error.h"

namespace mykv {

namespace {
long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr, 0);
}
}  // namespace

void Bell::ring() {
  count_.fetch_add(1, std::memory_order_seq_cst);
  if (sleeping_.load(std::memory_order_seq_cst) != 0) futex(&count_, FUTEX_WAKE, 1, nullptr);
}

void Bell::wait(uint32_t seen, int64_t timeout_us) {
  const timespec timeout{timeout_us / 1000000, (timeout_us % 1000000) * 1000};
  // A ring between the store and the call changes count_, and the kernel compares it with `seen` before it sleeps.
  sleeping_.store(1, std::memory_order_seq_cst);
  futex(&count_, FUTEX_WAIT, seen, &timeout);
  sleeping_.store(0, std::memory_order_seq_cst);
}

void SharedMutex::init() {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  const int failed = pthread_mutex_init(&mutex_, &attributes);
  pthread_mutexattr_destroy(&attributes);
  if (failed != 0) throw Error("mykv cannot make a lock in shared memory");
}

namespace {
void check_locked(int failed, pthread_mutex_t* mutex) {
  if (failed == 0) return;
  // The holder died inside: what it was changing cannot be trusted. The lock is left unusable on purpose, so that
  // every other rank gets this error too.
  if (failed == EOWNERDEAD) pthread_mutex_unlock(mutex);
  throw Error("a rank on this host died while it changed mykv's shared table");
}
}  // namespace

void SharedMutex::lock() { check_locked(pthread_mutex_lock(&mutex_), &mutex_); }

bool SharedMutex::try_lock(int64_t timeout_us) {
  timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += timeout_us / 1000000;
  until.tv_nsec += (timeout_us % 1000000) * 1000;
  if (until.tv_nsec >= 1000000000) {
    ++until.tv_sec;
    until.tv_nsec -= 1000000000;
  }
  const int failed = pthread_mutex_timedlock(&mutex_, &until);
  if (failed == ETIMEDOUT) return false;
  check_locked(failed, &mutex_);
  return true;
}

}  // namespace mykv
