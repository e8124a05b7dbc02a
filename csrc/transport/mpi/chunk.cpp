#include "transport/mpi/chunk.h"

#include <algorithm>
#include <utility>

#include "base/hash.h"
#include "kernels/kernels.h"

namespace mykv {

namespace {

constexpr size_t kStepBytes = 256 << 10;   // work between two looks at the network
constexpr size_t kDecodeBytes = 64 << 10;  // decoded of each host's values at a time, so that they stay in cache

}  // namespace

Chunk::Chunk(SliceExchange& exchange, uint32_t number, MpiRequests& requests, Staging& staging)
    : exchange_(exchange),
      number_(number),
      requests_(requests),
      staging_(staging),
      begin_(exchange.chunk_begin(number)),
      end_(exchange.chunk_begin(number + 1)),
      cursor_(begin_),
      phase_(exchange.reduces() ? Phase::reduce_on_host : Phase::exchange),
      received_(exchange.world().hosts().size()),
      encoded_(exchange.world().hosts().size()) {}

// Not in the constructor: begin() may fail after it has started messages, whose memory must stay.
void Chunk::begin() {
  exchange_.stamp_once(Stamp::begun);
  if (exchange_.wire().compression() != nullptr) ticket_ = exchange_.wire().compression()->take_ticket(number_);
  // With one rank on the host, its sum is in the own slot already.
  if (phase_ == Phase::reduce_on_host && exchange_.world().local_size() == 1) phase_ = Phase::exchange;
  if (phase_ == Phase::exchange) begin_exchange();
}

Chunk::HostShare Chunk::host_share(size_t host) const {
  const size_t count = end_ - begin_, hosts = exchange_.world().hosts().size();
  const int root = exchange_.root_host();
  if (root < 0) return {begin_ + count * host / hosts, begin_ + count * (host + 1) / hosts};
  const auto all = static_cast<size_t>(root);
  return {host <= all ? begin_ : end_, host < all ? begin_ : end_};
}

// Begins with the next host, so that the hosts do not all send to the same host first.
template <class Use>
void Chunk::for_others(Use&& use) const {
  const size_t hosts = exchange_.world().hosts().size();
  const auto me = static_cast<size_t>(exchange_.world().host());
  for (size_t i = 1; i < hosts; ++i) use((me + i) % hosts);
}

char* Chunk::staged(size_t bytes) {
  blocks_.push_back(staging_.take(bytes));
  return blocks_.back().data();
}

void Chunk::release() {
  for (Staging::Block& block : blocks_) staging_.give_back(std::move(block));
  blocks_.clear();
}

WireFormat::Place Chunk::place(const HostShare& values, SliceExchange::Leg leg, size_t owner) const {
  WireFormat::Place place;
  place.begin = values.begin - exchange_.begin();
  place.count = values.count();
  place.ticket = ticket_;
  place.is_result = leg == SliceExchange::Leg::gather;
  if (const CompressionState* compression = exchange_.wire().compression()) {
    const World& world = exchange_.world();
    const bool alike = compression->compressor().draws_alike();
    // Identifies the slice by its owner on the first host: several groups with one rank on each host may exist.
    const int slice = world.label(world.hosts()[0][static_cast<size_t>(world.local_rank())]);
    const uint64_t numbers[] = {static_cast<uint64_t>(slice), number_, owner,
                                alike ? 0 : static_cast<uint64_t>(leg) + 1,
                                alike ? 0 : static_cast<uint64_t>(world.rank())};
    place.stream = hash_bytes(numbers, sizeof numbers, compression->name());
  }
  return place;
}

// Results are encoded in the order of the operations, since each encoding adds what the previous one has lost.
bool Chunk::is_turn() const {
  CompressionState* const compression = exchange_.wire().compression();
  return compression == nullptr || compression->is_turn(number_, ticket_);
}

void Chunk::end_turn() const {
  if (CompressionState* const compression = exchange_.wire().compression()) compression->end_turn(number_);
}

void Chunk::begin_exchange() {
  if (exchange_.is_stopped()) return;  // no other host may get values that were read after the stop
  const WireFormat& wire = exchange_.wire();
  exchange_.stamp_once(Stamp::scatter);
  phase_ = Phase::exchange;
  if (!exchange_.reduces()) {
    expect_results();
    if (mine().count() > 0) send_result();
    reduced_ = true;
    return;
  }
  const int tag = exchange_.tag(number_, SliceExchange::Leg::scatter);
  for_others([&](size_t host) {
    const HostShare from_me = host_share(host);
    const size_t bytes = wire.bytes(mine().count());
    if (bytes > 0) {
      received_[host] = staged(bytes);
      requests_.receive(received_[host], bytes, exchange_.peer(host), tag, &receiving_);
    }
    if (from_me.count() == 0) return;
    const char* values = exchange_.own(from_me.begin);
    if (!wire.plain()) {
      char* encoded = staged(wire.bytes(from_me.count()));
      wire.encode(encoded, values, place(from_me, SliceExchange::Leg::scatter, host));
      values = encoded;
    }
    requests_.send(values, wire.bytes(from_me.count()), exchange_.peer(host), tag, &sending_);
  });
}

bool Chunk::step_exchange() {
  // Results are received into the memory of the values that are being sent.
  if (!expecting_ && sending_ == 0) {
    expect_results();
    return true;
  }
  if (!reduced_ && receiving_ == 0 && is_turn()) {
    exchange_.stamp(Stamp::scattered);
    if (mine().count() > 0) {
      reduce_own_share();
      if (exchange_.spreads()) send_result();
    }
    end_turn();
    reduced_ = true;
    return true;
  }
  if (!expecting_ || !reduced_ || results_ > 0) return false;
  if (exchange_.spreads()) exchange_.stamp(Stamp::gathered);
  take_results();
  cursor_ = begin_;
  phase_ = exchange_.spreads() ? Phase::spread : Phase::finished;
  return true;
}

void Chunk::expect_results() {
  expecting_ = true;
  if (!exchange_.spreads()) return;
  const WireFormat& wire = exchange_.wire();
  for_others([&](size_t host) {
    const HostShare theirs = host_share(host);
    if (theirs.count() == 0) return;
    char* to = exchange_.result(theirs.begin);
    if (!wire.plain()) to = encoded_[host] = staged(wire.bytes(theirs.count()));
    requests_.receive(to, wire.bytes(theirs.count()), exchange_.peer(host),
                      exchange_.tag(number_, SliceExchange::Leg::gather), &results_);
  });
}

// Reduces all hosts' values of the own share, in the order of the hosts.
void Chunk::reduce_own_share() {
  const WireFormat& wire = exchange_.wire();
  const Operation& op = exchange_.operation();
  const auto me = static_cast<size_t>(exchange_.world().host());
  const HostShare own = mine();
  const size_t width = item_size(op.dtype);
  const size_t stride = wire.plain() || !wire.divisible() ? own.count() : kDecodeBytes / width;
  std::vector<char*> decoded(received_.size());
  for_others([&](size_t host) {
    if (!wire.plain()) decoded[host] = staged(stride * width);
  });
  std::vector<const void*> inputs(received_.size());
  for (size_t at = own.begin; at < own.end; at += stride) {
    const size_t some = std::min(stride, own.end - at);
    for (size_t h = 0; h < received_.size(); ++h) {
      if (h == me) {
        inputs[h] = exchange_.own(at);
        continue;
      }
      const char* values = wire.at(received_[h], at - own.begin);
      if (!wire.plain()) {
        wire.decode(decoded[h], values, some);
        values = decoded[h];
      }
      inputs[h] = values;
    }
    void* output = exchange_.result(at);
    reduce(op.dtype, op.reduce_op, inputs.data(), static_cast<int>(inputs.size()), &output, 1, some, op.scale);
  }
}

void Chunk::send_result() {
  const WireFormat& wire = exchange_.wire();
  const HostShare own = mine();
  const auto me = static_cast<size_t>(exchange_.world().host());
  const char* values = exchange_.result(own.begin);
  if (!wire.plain()) {
    char* encoded = staged(wire.bytes(own.count()));
    wire.encode(encoded, values, place(own, SliceExchange::Leg::gather, me));
    // This host must continue with the same bits as the hosts that receive the encoded result.
    wire.decode(exchange_.result(own.begin), encoded, own.count());
    values = encoded;
  }
  exchange_.stamp_once(Stamp::gather);
  for_others([&](size_t host) {
    requests_.send(values, wire.bytes(own.count()), exchange_.peer(host),
                   exchange_.tag(number_, SliceExchange::Leg::gather), &results_);
  });
}

void Chunk::take_results() {
  const WireFormat& wire = exchange_.wire();
  for_others([&](size_t host) {
    const HostShare theirs = host_share(host);
    if (encoded_[host] != nullptr) wire.decode(exchange_.result(theirs.begin), encoded_[host], theirs.count());
  });
}

bool Chunk::step(bool spreading_too) {
  const size_t stop = std::min(end_, cursor_ + kStepBytes / item_size(exchange_.operation().dtype));
  switch (phase_) {
    case Phase::reduce_on_host:
      exchange_.reduce_on_host(cursor_, stop);
      cursor_ = stop;
      if (cursor_ == end_) begin_exchange();
      return true;
    case Phase::exchange:
      return step_exchange();
    case Phase::spread:
      if (!spreading_too) return false;
      if (exchange_.world().local_size() > 1) exchange_.spread(cursor_, stop);
      cursor_ = stop;
      if (cursor_ == end_) phase_ = Phase::finished;
      return true;
    case Phase::finished:
      return false;
  }
  return false;
}

}  // namespace mykv
