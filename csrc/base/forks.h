// Support for forks of the process.
#pragma once

#include <pthread.h>

#include <cstdint>
#include <mutex>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

namespace mykv {

// Differs between a process and its forks. So an object can tell whether this process is a fork of its creator. Unlike
// getpid(), it costs no system call.
uint32_t fork_number();

// The only T of the process, never destroyed. Its member `mutex` is reinitialized in a fork, since another thread may
// have held it.
template <class T>
T& usable_in_forks() {
  static T& object = *new T;
  static const int registered = pthread_atfork(nullptr, nullptr, [] {
    auto& mutex = usable_in_forks<T>().mutex;
    new (&mutex) std::remove_reference_t<decltype(mutex)>;
  });
  (void)registered;
  return object;
}

// Memory that MPI or a GPU may still use when its owner is destroyed.

template <class T>
struct KeptForever {
  std::mutex mutex;
  std::vector<T> values;
};

// Never destroys `value`. It stays reachable, so that leak checkers do not report it.
template <class T>
void keep_forever(T value) {
  auto& kept = usable_in_forks<KeptForever<T>>();
  std::lock_guard<std::mutex> lock(kept.mutex);
  kept.values.push_back(std::move(value));
}

}  // namespace mykv
