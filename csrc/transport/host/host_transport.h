// All ranks share one host's memory. A part whose shares are already in shared memory is cut into chunks. A rank that
// is awake takes the next chunk: it reads the chunk from every rank's slot and writes the result into every slot. So a
// rank that wakes up late slows nothing down. If ranks outnumber the cores, only some of them take chunks
// (HostTable::works_on).
//
// A part that must be copied in and out has an owner instead, a different rank for each part. The owner does not copy
// its own share, but reads and writes it in place. The other ranks copy their shares, as they would anyway. The owner
// of a reduce is its root. In a broadcast, each rank copies the result out of the root's slot.
//
// Elements are summed in the order of ranks, so the bits do not depend on the rank that computes them.
#pragma once

#include <queue>

#include "transport/host/slots.h"
#include "transport/transport.h"

namespace mykv {

class HostTransport : public Transport {
 public:
  HostTransport(const World& world, HostTable& table);
  int32_t owner(const Operation& operation, uint64_t number) const override;
  bool taken_from_root(const Operation& operation) const override;
  uint32_t pieces(const Operation& operation) const override;
  uint32_t sequence_numbers(const Operation&) const override { return 1; }
  size_t inline_limit() const override;
  void start(uint32_t entry, const LocalShare& share) override;
  void stop(uint32_t entry) override {
    if (entry < running_.size()) running_[entry] = 0;
  }
  bool progress() override;
  bool polling() const override { return false; }
  void run_whole(uint32_t entry) const override;

 private:
  struct Item {
    int32_t priority;
    uint64_t order;
    uint32_t entry;
    LocalShare share;
    bool operator<(const Item& other) const {
      return priority != other.priority ? priority < other.priority : order > other.order;
    }
  };
  void run_chunk(Entry& entry, uint32_t chunk) const;
  void run_owned(Entry& entry, const LocalShare& share) const;

  HostTable& table_;
  Slots slots_;
  const size_t chunk_bytes_;
  std::priority_queue<Item> ready_;
  std::vector<uint64_t> running_;  // by entry: the value of order_ at its start; 0: stopped
  uint64_t order_ = 0;
};

}  // namespace mykv
