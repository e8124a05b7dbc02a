// All ranks share one host's memory. An operation is cut into chunks, and whichever rank is awake takes the next one:
// it reads that chunk of every rank's slot and writes the result into every slot. No rank waits for a certain other
// one, so ranks that outnumber the cores, or are late to wake, slow nothing down; and since a chunk is summed in rank
// order whoever does it, the bits do not depend on who did.
#pragma once

#include <queue>

#include "transport/host/slots.h"
#include "transport/transport.h"

namespace mykv {

class HostTransport : public Transport {
 public:
  HostTransport(const World& world, Rendezvous& rendezvous);
  const char* name() const override { return "host"; }
  uint32_t pieces(const Operation& operation) const override;
  size_t inline_limit() const override;
  void start(uint32_t entry) override;
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
    bool operator<(const Item& other) const {
      return priority != other.priority ? priority < other.priority : order > other.order;
    }
  };
  void run_chunk(Entry& entry, uint32_t chunk) const;

  Rendezvous& rendezvous_;
  Slots slots_;
  std::priority_queue<Item> ready_;
  std::vector<uint64_t> running_;  // by entry: the order under which it was started, 0 when stopped
  uint64_t order_ = 0;
};

}  // namespace mykv
