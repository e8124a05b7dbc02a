// Several hosts: shared memory within each, MPI between them. An operation is cut into as many slices as the smallest
// host has ranks. The n-th rank of each host owns slice n: it reduces the slice over its own host, exchanges it with
// the owners of that slice on the other hosts, and writes the result into every slot of its host. So every rank
// drives the network at the same time.
//
// Between hosts the slice is reduced by a direct reduce-scatter and allgather: of the slice each host gets one
// segment from all others, reduces it in the order of the hosts, and sends the result to all. One host computes a
// segment for all, so the bits are the same everywhere.
#pragma once

#include <mpi.h>

#include <deque>
#include <memory>
#include <vector>

#include "transport/host/slots.h"
#include "transport/transport.h"

namespace mykv {

class SliceExchange;

class MpiTransport : public Transport {
 public:
  MpiTransport(const World& world, Rendezvous& rendezvous);
  ~MpiTransport() override;
  const char* name() const override { return "mpi"; }
  int32_t owner(const Operation&, uint64_t) const override { return kAnybody; }
  uint32_t pieces(const Operation&) const override { return slices_; }
  size_t inline_limit() const override { return 0; }
  void run_whole(uint32_t) const override {}
  void start(uint32_t entry, const Share& share) override;
  void stop(uint32_t) override {}
  bool progress() override;
  bool polling() const override { return !exchanges_.empty(); }

 private:
  const World& world_;
  Rendezvous& rendezvous_;
  Slots slots_;
  uint32_t slices_;
  std::deque<std::unique_ptr<SliceExchange>> exchanges_;
};

}  // namespace mykv
