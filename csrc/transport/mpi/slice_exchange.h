// One slice of one operation on its way between the hosts: a small state machine that never blocks.
#pragma once

#include <mpi.h>

#include <vector>

#include "transport/host/slots.h"
#include "transport/transport.h"

namespace mykv {

class SliceExchange {
 public:
  // `stamps`: where to say when it did what, or null.
  SliceExchange(const World& world, Slots& slots, Entry& entry, uint32_t index, uint32_t slices, Stamps* stamps);
  SliceExchange(const SliceExchange&) = delete;
  SliceExchange& operator=(const SliceExchange&) = delete;

  // One step; returns whether anything moved.
  bool step();
  bool finished() const { return phase_ == Phase::finished; }
  uint32_t index() const { return index_; }

 private:
  enum class Phase { reduce_on_host, scatter, gather, broadcast, spread, finished };

  void begin_scatter();
  void begin_gather();
  void begin_broadcast();
  bool requests_done();
  size_t segment_begin(size_t host) const;
  char* own(size_t element) const;
  DType wire() const { return entry_.operation.wire.value_or(entry_.operation.dtype); }
  size_t wire_bytes(size_t elements) const { return elements * item_size(wire()); }
  const void* to_wire(size_t begin, size_t end);
  void reduce_segment(size_t begin, size_t end);
  void widen_received();
  int peer(size_t host) const { return world_.hosts()[host][static_cast<size_t>(world_.local_rank())]; }
  int tag(int phase) const;
  void send(const void* data, size_t bytes, size_t host, int phase);
  void receive(void* data, size_t bytes, size_t host, int phase);
  void stamp(Stamp stamp) {
    if (stamps_ != nullptr) stamps_->set(stamp);
  }

  const World& world_;
  Slots& slots_;
  Entry& entry_;
  uint32_t index_;
  Stamps* stamps_;
  size_t begin_;
  size_t end_;
  size_t cursor_;
  Phase phase_;
  int source_;                               // the local rank whose slot holds the result before it is spread
  std::vector<std::vector<char>> received_;  // from each host, as it travels
  std::vector<std::vector<char>> narrowed_;  // what is sent, where it travels in another type
  std::vector<MPI_Request> requests_;
};

}  // namespace mykv
