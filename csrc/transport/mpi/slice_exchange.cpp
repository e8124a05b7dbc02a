#include "transport/mpi/slice_exchange.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace mykv {

HostGrid HostGrid::square(size_t hosts) {
  const auto most_square = static_cast<size_t>(std::lround(std::sqrt(static_cast<double>(hosts))));
  for (size_t off = 0; off <= most_square / 3; ++off) {
    if (hosts % (most_square - off) == 0) return {hosts, most_square - off};
    if (hosts % (most_square + off) == 0) return {hosts, most_square + off};
  }
  return {hosts, most_square};
}

namespace {

// Chunks overlap: while a chunk is on the wire, another chunk is reduced. A column of a chunk is a message, and from
// about 16 KiB on the bytes of a message cost more than its overhead. Messages between rows are smaller, and few.
constexpr size_t kChunkBytes = 1 << 20;
constexpr size_t kLeastColumn = 16 << 10;
constexpr size_t kLeastBetweenRows = 1 << 10;
constexpr uint64_t kLegs = 2;

}  // namespace

SliceExchange::SliceExchange(const World& world, Slots& slots, Entry& entry, uint32_t index, uint32_t slices,
                             const HostGrid& grid, Stamps* stamps, std::shared_ptr<CompressionState> compression)
    : world_(world),
      grid_(grid),
      slots_(slots),
      entry_(entry),
      index_(index),
      stamps_(stamps),
      chunks_(chunks(entry.operation, slices, grid)),
      begin_(entry.operation.count * static_cast<size_t>(world.local_rank()) / slices),
      end_(entry.operation.count * static_cast<size_t>(world.local_rank() + 1) / slices),
      wire_(entry.operation, std::move(compression), end_ - begin_, world.hosts().size()),
      result_rank_(world.local_rank()) {
  if (root_host() == world.host()) result_rank_ = world.local_rank_of(entry.operation.root);
}

uint32_t SliceExchange::chunks(const Operation& operation, uint32_t slices, const HostGrid& grid) {
  const size_t largest_slice = (operation.count + slices - 1) / slices * item_size(operation.dtype);
  const size_t chunk =
      std::max({kChunkBytes, kLeastColumn * grid.columns(), kLeastBetweenRows * grid.columns() * grid.rows()});
  return static_cast<uint32_t>(std::max<size_t>(1, (largest_slice + chunk - 1) / chunk));
}

void SliceExchange::reduce_on_host(size_t begin, size_t end) const {
  slots_.reduce_into(entry_, begin, end, world_.local_rank());
}

// Distinguishes chunks in flight between two ranks. Each chunk has a different sequence number, and every MPI in use
// has more tags than there are chunks in flight.
int SliceExchange::tag(uint32_t chunk, Leg leg) const {
  const auto rounds = static_cast<uint64_t>(world_.largest_tag()) / kLegs;
  return static_cast<int>((sequence() + chunk) % rounds * kLegs + static_cast<uint64_t>(leg));
}

}  // namespace mykv
