#include "memory/private_in_forks.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <vector>

namespace mykv {

namespace {

struct SharedRange {
  char* base;
  size_t bytes;
  int fd;
};

struct SharedRanges {
  std::mutex mutex;
  std::vector<SharedRange> ranges;
};

SharedRanges& all();

// Another thread may be changing the list when its process forks.
void before_fork() { all().mutex.lock(); }

void in_parent() { all().mutex.unlock(); }

// Only calls that are safe in the child of a process with several threads.
void in_child() {
  SharedRanges& known = all();
  constexpr int kPlace = MAP_FIXED | MAP_NORESERVE;
  for (const SharedRange& one : known.ranges) {
    void* made = mmap(one.base, one.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | kPlace, one.fd, 0);
    // Where the kernel counts all private memory (vm.overcommit_memory=2), the child may only read.
    if (made == MAP_FAILED) (void)mmap(one.base, one.bytes, PROT_READ, MAP_PRIVATE | kPlace, one.fd, 0);
  }
  known.ranges.clear();  // a child of the child inherits private memory, and no system call frees this list
  new (&known.mutex) std::mutex;
}

SharedRanges& all() {
  static SharedRanges& known = *new SharedRanges;
  static const int registered = pthread_atfork(before_fork, in_parent, in_child);
  (void)registered;
  return known;
}

}  // namespace

void private_in_forks(char* base, size_t bytes, int fd) {
  SharedRanges& known = all();
  std::lock_guard<std::mutex> lock(known.mutex);
  known.ranges.push_back({base, bytes, fd});
}

void no_longer_private_in_forks(const char* base) {
  SharedRanges& known = all();
  std::lock_guard<std::mutex> lock(known.mutex);
  auto& ranges = known.ranges;
  ranges.erase(std::remove_if(ranges.begin(), ranges.end(), [&](const SharedRange& one) { return one.base == base; }),
               ranges.end());
}

}  // namespace mykv
