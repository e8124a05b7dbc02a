// The order in which the ranks of a host launch operations by NCCL. An NCCL operation holds its GPU until all ranks of
// its communicator have launched it, so two ranks that launch operations of two communicators in different orders
// deadlock. Each operation therefore gets a number from each of its ranks when all have arrived. The numbers of a rank
// have no gaps, and one lock around giving numbers puts all operations into one order.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "table/table_lock.h"

namespace mykv {

// A host has one object, in the table of the group of all ranks. Process sets use it too.
class LaunchOrder {
 public:
  static size_t bytes(int local_size);
  void init(int local_size);

  // Held while the numbers of one operation are given. `label`: this rank's label. False if another rank keeps the lock
  // for `patience_us`. Throws an Error that names the holder if the holder has died.
  bool lock(int64_t patience_us, int label);
  void unlock();
  // 'rank 3', the rank that holds the lock, or has died with it.
  std::string holder() const;
  // The next number of a local rank of the world; the first is 1.
  uint64_t next(int rank) { return ++last()[rank]; }

 private:
  uint64_t* last() { return reinterpret_cast<uint64_t*>(this + 1); }

  SharedMutex mutex_;
  std::atomic<int> holder_{0};  // the holder's label plus one; 0: none
};

}  // namespace mykv
