// One slice of one operation that is exchanged between the hosts, in chunks that travel independently of each other.
#pragma once

#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels/kernels.h"
#include "operations/operation.h"
#include "transport/host/slots.h"
#include "transport/mpi/compression_state.h"
#include "transport/transport.h"

namespace mykv {

// How the hosts that exchange a slice are arranged: in rows of neighbouring hosts, with about as many rows as columns.
//
// With one row each host exchanges with each other host: 2 (h - 1) messages each way for h hosts. With several rows it
// exchanges with the hosts of its row, and with a host of each other row: about 4 sqrt(h) messages each way, in four
// steps instead of two. No value crosses a link more often. (Two dimensions of the torus of Jain and Sabharwal,
// "Optimal bucket algorithms for large MPI collectives on torus interconnects", 2010, with messages sent directly in
// each dimension.)

class HostGrid {
 public:
  HostGrid(size_t hosts, size_t rows) : hosts_(hosts), rows_(rows) {}
  // A grid with about as many rows as columns, and if possible with rows of equal length.
  static HostGrid square(size_t hosts);

  size_t rows() const { return rows_; }
  // Hosts of the longest row; other rows have at most one host less.
  size_t columns() const { return (hosts_ + rows_ - 1) / rows_; }
  // A row consists of the hosts [begin(row), begin(row + 1)).
  size_t begin(size_t row) const { return hosts_ * row / rows_; }
  size_t row_of(size_t host) const { return ((host + 1) * rows_ - 1) / hosts_; }
  size_t width(size_t row) const { return begin(row + 1) - begin(row); }
  // The host of a row that reduces a column. In a shorter row the first host has two columns.
  size_t host(size_t row, size_t column) const { return begin(row) + column % width(row); }

 private:
  size_t hosts_;
  size_t rows_;
};

// The encoding of values between hosts: none, another type, or compression.

class WireFormat {
 public:
  // Facts about sent values that compression needs.
  struct EncodeArguments {
    size_t begin = 0;  // elements from the beginning of the slice
    size_t count = 0;
    uint32_t use = 0;        // the number of this use, from CompressionState::take_use()
    uint64_t stream = 0;     // identifies the message within one use; see Chunk::encode_arguments()
    bool is_result = false;  // the reduced and scaled result, not the sum of one host
  };

  // For a slice of `slice` elements. `compression`: null if values are not compressed.
  WireFormat(const Operation& operation, std::shared_ptr<CompressionState> compression, size_t slice, size_t hosts)
      : dtype_(operation.dtype),
        wire_(operation.wire.value_or(operation.dtype)),
        compression_(std::move(compression)),
        slice_(slice),
        result_travels_(operation.kind == Kind::allreduce),
        result_unit_(std::fabs(operation.scale) * static_cast<double>(hosts)) {}

  // Whether values are sent unencoded, as in memory.
  bool plain() const { return wire_ == dtype_ && compression_ == nullptr; }
  // Whether values that were encoded together can be decoded in pieces.
  bool divisible() const { return compression_ == nullptr; }
  CompressionState* compression() const { return compression_.get(); }
  // The bytes of `elements` elements on the wire.
  size_t bytes(size_t elements) const {
    return compression_ == nullptr ? elements * item_size(wire_) : compression_->compressor().bytes(piece(elements));
  }
  // The address of element `begin` in the output of encode(); only if divisible().
  const char* at(const char* encoded, size_t begin) const { return encoded + begin * item_size(wire_); }

  void encode(char* to, const char* from, const EncodeArguments& arguments) const {
    if (compression_ == nullptr) {
      convert(wire_, to, dtype_, from, arguments.count);
      return;
    }
    compress::Input input;
    input.values = from;
    input.residual = compression_->residual(arguments.begin, slice_);
    // The result sums the values of all hosts, so its unit is one host's unit times the number of hosts and the scale.
    // With one host's unit, thresholds would be too small for the result.
    input.unit = arguments.is_result ? result_unit_ : 1.0;
    input.again = result_travels_ && !arguments.is_result;
    input.draws.step = arguments.use;
    input.draws.stream = arguments.stream;
    compression_->compressor().encode(piece(arguments.count), input, to);
  }

  void decode(char* to, const char* from, size_t elements) const {
    if (compression_ == nullptr) {
      convert(dtype_, to, wire_, from, elements);
    } else {
      compression_->compressor().decode(piece(elements), from, to);
    }
  }

 private:
  compress::Piece piece(size_t elements) const { return {dtype_, elements, compression_->total()}; }

  DType dtype_;
  DType wire_;
  std::shared_ptr<CompressionState> compression_;
  size_t slice_;
  // Whether the result is sent to all hosts; the result of a reduce stays on the host that computes it.
  bool result_travels_;
  double result_unit_;
};

// The common state of a slice's chunks. Each chunk is divided into the columns of a grid of hosts. Within a row of
// hosts, each host receives the values of its column from all other hosts, reduces them, and sends the result to all.
// With several rows, the hosts that have reduced the same column exchange it in the same way before they send the
// result. The values of a broadcast are divided in the same way. In a reduce, and in a broadcast that is one of
// several, there is one row, and the whole chunk is the column of the root's host.
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
  // The type of a host's sums on their way to the host that reduces them. A host with one rank sends its share as it
  // is.
  DType sum_type(size_t host) const {
    if (!reduces() || world_.hosts()[host].size() == 1) return operation().dtype;
    return partial_type(operation().dtype, operation().reduce_op);
  }
  // The host of the operation's root; -1: the operation has no root.
  int root_host() const { return operation().kind == Kind::allreduce ? -1 : world_.host_of(operation().root); }
  // Whether the root's host sends each host only a part of a broadcast's values, and the hosts then exchange these
  // parts as they exchange results. Each value then crosses the root's link at most twice, instead of once for each
  // other host.
  bool scatters() const { return divides(operation()) && !reduces() && world_.hosts().size() > 2; }
  // Whether chunks of this operation are divided into columns; otherwise a chunk is the column of one host.
  static bool divides(const Operation& operation) {
    return operation.kind == Kind::allreduce || (operation.kind == Kind::broadcast && !operation.has_concurrent_roots);
  }

  // Whether the operation has failed: other ranks of this host may have reused their slots.
  bool is_stopped() const {
    std::atomic_thread_fence(std::memory_order_acquire);  // earlier reads of slots stay before the load
    return (entry_.next_chunk.load(std::memory_order_acquire) & kStopped) != 0;
  }

  // The address of an element in this rank's slot, which holds this host's sum of a reduction.
  char* own(size_t element) const { return at(world_.local_rank(), element); }
  // The address of an element in the slot that holds the result.
  char* result(size_t element) const { return at(result_rank_, element); }
  // Reduces the shares of this host, into this rank's slot or, as values of sum_type(), into the memory at `to`.
  void reduce_on_host(size_t begin, size_t end) const;
  void reduce_on_host(size_t begin, size_t end, char* to) const { slots_.sum_into(entry_, begin, end, to); }
  void spread(size_t begin, size_t end) const { slots_.spread(entry_, begin, end, result_rank_); }

  // The rank that owns this slice on another host, and the tag of a chunk's messages to and from that rank.
  int peer(size_t host) const { return world_.hosts()[host][static_cast<size_t>(world_.local_rank())]; }
  enum class Leg { scatter, gather };
  int tag(uint32_t chunk, Leg leg) const;

  // Counts a chunk as finished. Returns whether it was the last chunk.
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
