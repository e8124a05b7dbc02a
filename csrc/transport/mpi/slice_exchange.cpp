#include "transport/mpi/slice_exchange.h"

#include <algorithm>
#include <string>

#include "kernels/kernels.h"
#include "runtime/error.h"

namespace mykv {

namespace {

constexpr size_t kStepBytes = 256 << 10;          // work done between two looks at the network
constexpr size_t kWidenBytes = 64 << 10;          // of each host's values at a time, so that they stay in cache
constexpr size_t kMostMessage = size_t{1} << 30;  // MPI counts with int; messages of one tag keep their order
constexpr int kScatter = 0, kGather = 1, kBroadcast = 2, kPhases = 3;

void check(int code, const char* what) {
  if (code != MPI_SUCCESS) throw Error(std::string("MPI failed in ") + what + " between hosts");
}

}  // namespace

SliceExchange::SliceExchange(const World& world, Slots& slots, Entry& entry, uint32_t index, uint32_t slices,
                             Stamps* stamps)
    : world_(world), slots_(slots), entry_(entry), index_(index), stamps_(stamps) {
  stamp(Stamp::begun);
  const size_t count = entry.operation.count;
  const auto slice = static_cast<size_t>(world.local_rank());
  begin_ = count * slice / slices;
  end_ = count * (slice + 1) / slices;
  cursor_ = begin_;
  source_ = world.local_rank();
  phase_ = entry.operation.kind == Kind::allreduce ? Phase::reduce_on_host : Phase::broadcast;
  if (phase_ == Phase::broadcast) begin_broadcast();
}

size_t SliceExchange::segment_begin(size_t host) const {
  return begin_ + (end_ - begin_) * host / world_.hosts().size();
}

char* SliceExchange::own(size_t element) const {
  return slots_.slot(entry_, world_.local_rank()) + element * item_size(entry_.operation.dtype);
}

// Tells operations in flight between two ranks apart; no MPI in use offers so few tags that they would meet again.
int SliceExchange::tag(int phase) const {
  const auto turns = static_cast<uint64_t>(world_.largest_tag() / kPhases);
  return static_cast<int>(entry_.sequence % turns) * kPhases + phase;
}

void SliceExchange::send(const void* data, size_t bytes, size_t host, int phase) {
  auto* at = static_cast<const char*>(data);
  for (size_t left = bytes; left > 0;) {
    const size_t some = std::min(left, kMostMessage);
    requests_.emplace_back();
    check(MPI_Isend(at, static_cast<int>(some), MPI_BYTE, peer(host), tag(phase), world_.data(), &requests_.back()),
          "MPI_Isend");
    at += some;
    left -= some;
  }
}

void SliceExchange::receive(void* data, size_t bytes, size_t host, int phase) {
  auto* at = static_cast<char*>(data);
  for (size_t left = bytes; left > 0;) {
    const size_t some = std::min(left, kMostMessage);
    requests_.emplace_back();
    check(MPI_Irecv(at, static_cast<int>(some), MPI_BYTE, peer(host), tag(phase), world_.data(), &requests_.back()),
          "MPI_Irecv");
    at += some;
    left -= some;
  }
}

// Elements of the own slot as they travel; in memory that stays until the exchange is over.
const void* SliceExchange::to_wire(size_t begin, size_t end) {
  if (!entry_.operation.wire) return own(begin);
  narrowed_.emplace_back(wire_bytes(end - begin));
  convert(wire(), narrowed_.back().data(), entry_.operation.dtype, own(begin), end - begin);
  return narrowed_.back().data();
}

void SliceExchange::begin_scatter() {
  const size_t hosts = world_.hosts().size();
  const auto me = static_cast<size_t>(world_.host());
  const size_t mine = wire_bytes(segment_begin(me + 1) - segment_begin(me));
  stamp(Stamp::scatter);
  received_.resize(hosts);
  for (size_t h = 0; h < hosts; ++h) {
    if (h == me) continue;
    received_[h].resize(mine);
    receive(received_[h].data(), mine, h, kScatter);
    const size_t begin = segment_begin(h), end = segment_begin(h + 1);
    send(to_wire(begin, end), wire_bytes(end - begin), h, kScatter);
  }
  phase_ = Phase::scatter;
}

// Sums what all hosts have of the own segment, in their order, into the own slot.
void SliceExchange::reduce_segment(size_t begin, size_t end) {
  const size_t hosts = world_.hosts().size();
  const auto me = static_cast<size_t>(world_.host());
  const Operation& op = entry_.operation;
  const size_t width = item_size(op.dtype);
  const size_t stride = op.wire ? kWidenBytes / width : end - begin;
  std::vector<std::vector<char>> widened(op.wire ? hosts : 0, std::vector<char>(kWidenBytes));
  std::vector<const void*> inputs(hosts);
  for (size_t at = begin; at < end; at += stride) {
    const size_t some = std::min(stride, end - at);
    for (size_t h = 0; h < hosts; ++h) {
      const char* received = received_[h].data() + wire_bytes(at - begin);
      if (h == me) {
        inputs[h] = own(at);
      } else if (op.wire) {
        convert(op.dtype, widened[h].data(), *op.wire, received, some);
        inputs[h] = widened[h].data();
      } else {
        inputs[h] = received;
      }
    }
    void* output = own(at);
    reduce(op.dtype, op.reduce_op, inputs.data(), static_cast<int>(hosts), &output, 1, some, op.scale, false);
  }
}

void SliceExchange::begin_gather() {
  const size_t hosts = world_.hosts().size();
  const auto me = static_cast<size_t>(world_.host());
  const size_t begin = segment_begin(me), end = segment_begin(me + 1);
  stamp(Stamp::scattered);
  reduce_segment(begin, end);
  narrowed_.clear();
  const void* result = to_wire(begin, end);
  // This host must go on with the same bits as those that get them over the wire.
  if (entry_.operation.wire) convert(entry_.operation.dtype, own(begin), wire(), result, end - begin);
  stamp(Stamp::gather);
  for (size_t h = 0; h < hosts; ++h) {
    if (h == me) continue;
    const size_t first = segment_begin(h), bytes = wire_bytes(segment_begin(h + 1) - first);
    if (entry_.operation.wire) received_[h].resize(bytes);
    receive(entry_.operation.wire ? received_[h].data() : own(first), bytes, h, kGather);
    send(result, wire_bytes(end - begin), h, kGather);
  }
  phase_ = Phase::gather;
}

void SliceExchange::widen_received() {
  for (size_t h = 0; h < received_.size(); ++h) {
    if (static_cast<int>(h) == world_.host()) continue;
    const size_t begin = segment_begin(h), end = segment_begin(h + 1);
    convert(entry_.operation.dtype, own(begin), wire(), received_[h].data(), end - begin);
  }
}

void SliceExchange::begin_broadcast() {
  const size_t width = item_size(entry_.operation.dtype);
  const int root_host = world_.host_of(entry_.operation.root);
  stamp(Stamp::scatter);
  if (root_host != world_.host()) {
    receive(own(begin_), (end_ - begin_) * width, static_cast<size_t>(root_host), kBroadcast);
    return;
  }
  const std::vector<int>& ranks = world_.hosts()[static_cast<size_t>(root_host)];
  source_ = static_cast<int>(std::find(ranks.begin(), ranks.end(), entry_.operation.root) - ranks.begin());
  const char* data = slots_.slot(entry_, source_) + begin_ * width;
  for (size_t h = 0; h < world_.hosts().size(); ++h) {
    if (static_cast<int>(h) != root_host) send(data, (end_ - begin_) * width, h, kBroadcast);
  }
}

bool SliceExchange::requests_done() {
  int done = 0;
  check(MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &done, MPI_STATUSES_IGNORE), "MPI_Testall");
  if (done) requests_.clear();
  return done != 0;
}

bool SliceExchange::step() {
  const size_t stride = kStepBytes / item_size(entry_.operation.dtype);
  const size_t stop = std::min(end_, cursor_ + stride);
  switch (phase_) {
    case Phase::reduce_on_host:
      slots_.reduce_into(entry_, cursor_, stop, world_.local_rank());
      cursor_ = stop;
      if (cursor_ == end_) begin_scatter();
      return true;
    case Phase::scatter:
      if (!requests_done()) return false;
      begin_gather();
      return true;
    case Phase::gather:
    case Phase::broadcast:
      if (!requests_done()) return false;
      stamp(Stamp::gathered);
      if (phase_ == Phase::gather && entry_.operation.wire) widen_received();
      cursor_ = begin_;
      phase_ = Phase::spread;
      return true;
    case Phase::spread:
      slots_.spread(entry_, cursor_, stop, source_);
      cursor_ = stop;
      if (cursor_ < end_) return true;
      stamp(Stamp::finished);
      phase_ = Phase::finished;
      return true;
    case Phase::finished:
      return false;
  }
  return false;
}

}  // namespace mykv
