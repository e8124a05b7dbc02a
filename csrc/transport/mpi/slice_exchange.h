// One slice of one operation that is exchanged between the hosts, in chunks that travel independently of each other.
#pragma once

#include <atomic>
#include <cstdint>

#include "transport/host/slots.h"
#include "transport/mpi/host_grid.h"
#include "transport/mpi/wire_format.h"
#include "transport/transport.h"

namespace mykv {

// What the chunks of a slice have in common. Each chunk is divided into the columns of a grid of hosts. Within a row of
// hosts, a host receives its column from all others, reduces it, and sends the result to all. With several rows, the
// hosts that have reduced the same column exchange it in the same way before they send the result. The values of a
// broadcast are divided alike. In a reduce, and in a broadcast that is one of several, there is one row, and the whole
// chunk is the column of the root's host.
class SliceExchange {
 public:
  // `stamps`: where to record times, or null. `compression`: null if values are not compressed.
  SliceExchange(const World& world, Slots& slots, Entry& entry, uint32_t index, uint32_t slices, const HostGrid& grid,
                Stamps* stamps, std::shared_ptr<CompressionState> compression);
  SliceExchange(const SliceExchange&) = delete;
  SliceExchange& operator=(const SliceExchange&) = delete;

  // The number of chunks of a slice; the same on all ranks, although slices may differ by an element.
  static uint32_t chunks(const Operation& operation, uint32_t slices, const HostGrid& grid);

  const World& world() const { return world_; }
  const HostGrid& grid() const { return grid_; }
  const Operation& operation() const { return entry_.operation; }
  uint32_t index() const { return index_; }
  uint64_t sequence() const { return entry_.sequence; }
  uint32_t chunks() const { return chunks_; }
  size_t begin() const { return begin_; }
  size_t chunk_begin(uint32_t chunk) const { return begin_ + (end_ - begin_) * chunk / chunks_; }
  const WireFormat& wire() const { return wire_; }
  // Whether every host's values are needed for the result.
  bool reduces() const { return operation().kind != Kind::broadcast; }
  // Whether all hosts get the result.
  bool spreads() const { return operation().kind == Kind::allreduce || !reduces(); }
  // The type of a host's sums on their way to the host that reduces them. A host of one rank has its share as it is.
  DType sum_type(size_t host) const {
    if (!reduces() || world_.hosts()[host].size() == 1) return operation().dtype;
    return partial_type(operation().dtype, operation().reduce_op);
  }
  // The host of the operation's root, or -1.
  int root_host() const { return operation().kind == Kind::allreduce ? -1 : world_.host_of(operation().root); }
  // Whether the root's host sends each host its part of the values, and the hosts spread these parts as they spread
  // results. Each value then crosses the root's link twice at most, and not once for each other host.
  bool scatters() const { return divides(operation()) && !reduces() && world_.hosts().size() > 2; }
  // Whether operations of this kind need not be the column of one host.
  static bool divides(const Operation& operation) {
    return operation.kind == Kind::allreduce || (operation.kind == Kind::broadcast && !operation.of_several);
  }

  // Whether the operation has failed: other ranks of this host may have reused their slots.
  bool is_stopped() const {
    std::atomic_thread_fence(std::memory_order_acquire);  // earlier reads of slots stay before the load
    return (entry_.next_chunk.load(std::memory_order_acquire) & kStopped) != 0;
  }

  // The address of an element in the own slot, which holds this host's sum of a reduction.
  char* own(size_t element) const { return at(world_.local_rank(), element); }
  // The address of an element in the slot that holds the result.
  char* result(size_t element) const { return at(result_rank_, element); }
  // Reduces the shares of the own host, into the own slot or, as values of sum_type(), into memory behind `to`.
  void reduce_on_host(size_t begin, size_t end) const;
  void reduce_on_host(size_t begin, size_t end, char* to) const { slots_.sum_into(entry_, begin, end, to); }
  void spread(size_t begin, size_t end) const { slots_.spread(entry_, begin, end, result_rank_); }

  // The rank that owns this slice on another host, and the tag of a chunk's messages to and from that rank.
  int peer(size_t host) const { return world_.hosts()[host][static_cast<size_t>(world_.local_rank())]; }
  enum class Leg { scatter, gather };
  int tag(uint32_t chunk, Leg leg) const;

  // Counts a chunk as finished; whether it was the last chunk.
  bool finish_chunk() { return ++finished_ == chunks_; }
  void stamp(Stamp stamp) {
    if (stamps_ != nullptr) stamps_->set(stamp);
  }
  void stamp_once(Stamp stamp) {
    if (stamps_ != nullptr) stamps_->set_once(stamp);
  }

 private:
  char* at(int local_rank, size_t element) const {
    return slots_.slot(entry_, local_rank) + element * item_size(operation().dtype);
  }

  const World& world_;
  const HostGrid grid_;
  Slots& slots_;
  Entry& entry_;
  uint32_t index_;
  Stamps* stamps_;
  uint32_t chunks_;
  uint32_t finished_ = 0;
  size_t begin_;
  size_t end_;
  WireFormat wire_;
  int result_rank_;
};

}  // namespace mykv
