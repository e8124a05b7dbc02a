// The order in which the ranks of a host launch operations by NCCL. An NCCL operation holds its GPU until all ranks of
// its communicator have launched it, so two ranks that launch operations of two communicators in different orders
// deadlock. Each operation therefore gets a number from each of its ranks when all have arrived. The numbers of a rank
// have no gaps, and one lock around giving numbers puts all operations into one order.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "table/host_table.h"
#include "table/table_lock.h"

namespace mykv {

// A host has one object, in the table of the group of all ranks. Process sets use it too.
class LaunchOrder {
 public:
  // The object in this table. The first rank of the host initializes it, when no rank uses NCCL yet.
  static LaunchOrder& in(const HostTable& table);
  void init() { mutex_.init(); }

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
  // The last number of each local rank follows.
};

// Gives the operations of a group their numbers. Since the numbers are given under the table's lock, a rank waits for
// the launch order for a moment only.
class LaunchNumbers : public ReadyHook {
 public:
  // `ranks`: this host's ranks, as local ranks of the world.
  LaunchNumbers(HostTable& table, LaunchOrder& order, std::vector<int> ranks);

  bool concerns(const Operation& operation) const override { return operation.road == DataPath::nccl; }
  uint64_t placement(Entry& entry) const override;
  bool make_ready(Entry& entry, bool tries_again) override;

  // Withdraws this rank's launch of an entry. Returns the number of the launch; 0: it has no number, and will get none.
  uint64_t forgo(uint32_t index);
  // This rank's number for an entry at which it has arrived, or 0; reads without the lock.
  uint64_t given(uint32_t index) const;

 private:
  uint64_t& mine(uint32_t index) const { return table_.entry(index).records()[table_.local_rank()].launch; }

  HostTable& table_;
  LaunchOrder& order_;
  const std::vector<int> ranks_;
};

}  // namespace mykv
