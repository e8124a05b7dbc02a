// What holds in forks of a process.
#pragma once

#include <pthread.h>

#include <cstdint>
#include <new>
#include <type_traits>

namespace mykv {

// Differs between a process and its forks, which share all that was made before the fork. So an object can tell whether
// this process is a fork of the process that made it; costs no system call, as getpid() does.
uint32_t fork_number();

// The only T of the process, never destroyed. Its member `mutex` is made anew in a fork, since another thread may have
// held it.
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

}  // namespace mykv
