// In which order the ranks of a host launch what goes by NCCL. An operation of NCCL's holds its GPU until all ranks of
// its communicator have come, so two ranks that launch two communicators' operations in different orders wait for each
// other for ever. Each operation therefore gets, when all have arrived, a number from each of its ranks: numbers of a
// rank have no gaps, and one lock around giving them makes all of them parts of one order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "table/shared_mutex.h"

namespace mykv {

// Lies in the table of the world of a host; process sets use that of the world.
class LaunchOrder {
 public:
  static size_t bytes(int local_size);
  void init(int local_size);

  // The numbers of one operation are given while this is held. Throws Error where another rank keeps it, or has died
  // with it.
  void lock();
  void unlock() { mutex_.unlock(); }
  // The next one of a local rank of the world; the first is 1.
  uint64_t next(int rank) { return ++last()[rank]; }

 private:
  uint64_t* last() { return reinterpret_cast<uint64_t*>(this + 1); }

  SharedMutex mutex_;
};

}  // namespace mykv
