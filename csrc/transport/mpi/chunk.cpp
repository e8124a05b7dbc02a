#include "transport/mpi/chunk.h"

#include <algorithm>
#include <utility>

#include "kernels/kernels.h"
#include "operations/operation.h"

namespace mykv {

namespace {

// Bytes of each host's values that are decoded at a time, so that they stay in cache.
constexpr size_t kDecodeBytes = 64 << 10;

// The type of sums exchanged between rows.
DType sum_type(const Operation& op) { return partial_type(op.dtype, op.reduce_op); }

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
      row_(exchange.grid().row_of(me())),
      encoded_(exchange.grid().columns()) {
  for_columns_of(me(), [&](size_t column) {
    columns_.push_back({column, std::vector<char*>(std::max(exchange.grid().columns(), exchange.grid().rows()))});
  });
}

// This work is not done in the constructor, since it may fail after it has started messages, whose memory must stay.
void Chunk::begin() {
  exchange_.stamp_once(Stamp::begun);
  if (exchange_.wire().compression() != nullptr) use_ = exchange_.wire().compression()->take_use(number_);
  // With one rank on the host, the host's sum is in this rank's slot already.
  if (phase_ == Phase::reduce_on_host && exchange_.world().local_size() == 1) phase_ = Phase::exchange;
  if (phase_ == Phase::reduce_on_host && exchange_.sum_type(me()) != exchange_.operation().dtype)
    sums_ = staged((end_ - begin_) * item_size(exchange_.sum_type(me())));
  if (phase_ == Phase::exchange) begin_exchange();
}

// This host's sums, starting at an element.
const char* Chunk::own(size_t element) const {
  return sums_ == nullptr ? exchange_.own(element) : sums_ + (element - begin_) * item_size(exchange_.sum_type(me()));
}

// The size in bytes of a host's sums, as sent to the host that reduces them.
size_t Chunk::sum_bytes(const Share& values, size_t host) const {
  const WireFormat& wire = exchange_.wire();
  return wire.plain() ? values.count() * item_size(exchange_.sum_type(host)) : wire.bytes(values.count());
}

Chunk::Share Chunk::share(size_t column) const {
  const size_t count = end_ - begin_, columns = exchange_.grid().columns();
  const int root = exchange_.scatters() ? -1 : exchange_.root_host();
  if (root < 0) return {begin_ + count * column / columns, begin_ + count * (column + 1) / columns};
  const auto all = static_cast<size_t>(root);
  return {column <= all ? begin_ : end_, column < all ? begin_ : end_};
}

// The part of a column that a row's host reduces over all rows.
Chunk::Share Chunk::share(size_t column, size_t row) const {
  const Share whole = share(column);
  const size_t rows = exchange_.grid().rows();
  return {whole.begin + whole.count() * row / rows, whole.begin + whole.count() * (row + 1) / rows};
}

// Calls use() for the other hosts of this row. Begins with the next host, so that the hosts do not all send to the same
// host first.
template <class Use>
void Chunk::for_row(Use&& use) const {
  const HostGrid& grid = exchange_.grid();
  const size_t first = grid.begin(row_), width = grid.width(row_);
  for (size_t i = 1; i < width; ++i) use(first + (me() - first + i) % width);
}

template <class Use>
void Chunk::for_other_rows(Use&& use) const {
  const size_t rows = exchange_.grid().rows();
  for (size_t i = 1; i < rows; ++i) use((row_ + i) % rows);
}

// The columns that a host of this row reduces. The order is always the same, since all messages between two hosts have
// the same tag.
template <class Use>
void Chunk::for_columns_of(size_t host, Use&& use) const {
  const HostGrid& grid = exchange_.grid();
  for (size_t column = host - grid.begin(row_); column < grid.columns(); column += grid.width(row_)) use(column);
}

char* Chunk::staged(size_t bytes) {
  blocks_.push_back(staging_.take(bytes));
  return blocks_.back().data();
}

void Chunk::release() {
  for (Staging::Block& block : blocks_) staging_.give_back(std::move(block));
  blocks_.clear();
}

WireFormat::EncodeArguments Chunk::encode_arguments(const Share& values, SliceExchange::Leg leg, size_t owner) const {
  WireFormat::EncodeArguments arguments;
  arguments.begin = values.begin - exchange_.begin();
  arguments.count = values.count();
  arguments.use = use_;
  arguments.is_result = leg == SliceExchange::Leg::gather;
  if (const CompressionState* compression = exchange_.wire().compression()) {
    const World& world = exchange_.world();
    const bool alike = compression->compressor().draws_alike();
    // Identifies the slice by its owner on the first host: several groups with one rank on each host may exist.
    const int slice = world.label(world.hosts()[0][static_cast<size_t>(world.local_rank())]);
    const uint64_t numbers[] = {static_cast<uint64_t>(slice), number_, owner,
                                alike ? 0 : static_cast<uint64_t>(leg) + 1,
                                alike ? 0 : static_cast<uint64_t>(world.rank())};
    arguments.stream = hash_bytes(numbers, sizeof numbers, compression->name());
  }
  return arguments;
}

// Results are encoded in the order of the operations, since each encoding adds the values that the previous encoding
// lost.
bool Chunk::is_next_use() const {
  CompressionState* const compression = exchange_.wire().compression();
  return compression == nullptr || compression->is_next(number_, use_);
}

void Chunk::end_use() const {
  if (CompressionState* const compression = exchange_.wire().compression()) compression->end_use(number_);
}

// Whether the host is that of the root: it has all values from the start, and receives no results.
bool Chunk::is_complete(size_t host) const {
  return exchange_.scatters() && static_cast<int>(host) == exchange_.root_host();
}

// The root's host sends each other host its part of the columns.
void Chunk::begin_broadcast() {
  const HostGrid& grid = exchange_.grid();
  const auto root = static_cast<size_t>(exchange_.root_host());
  const int tag = exchange_.tag(number_, SliceExchange::Leg::scatter);
  const auto bytes = [&](const Share& values) { return exchange_.wire().bytes(values.count()); };
  step_ = grid.rows() > 1 ? Step::scatter_across : Step::gather_across;
  if (!is_complete(me())) {
    for (const Column& column : columns_) {
      const Share mine = share(column.number, row_);
      if (mine.count() == 0) continue;
      requests_.receive(exchange_.result(mine.begin), bytes(mine), exchange_.peer(root), tag, &receiving_);
    }
    return;
  }
  for (size_t row = 0; row < grid.rows(); ++row) {
    for (size_t column = 0; column < grid.columns(); ++column) {
      const size_t host = grid.host(row, column);
      const Share theirs = share(column, row);
      if (host == me() || theirs.count() == 0) continue;
      requests_.send(exchange_.result(theirs.begin), bytes(theirs), exchange_.peer(host), tag, &sending_);
    }
  }
}

void Chunk::begin_exchange() {
  if (exchange_.is_stopped()) return;  // no other host may get values that were read after the stop
  const WireFormat& wire = exchange_.wire();
  exchange_.stamp_once(Stamp::scatter);
  phase_ = Phase::exchange;
  if (exchange_.scatters()) {
    begin_broadcast();
    return;
  }
  if (!exchange_.reduces()) {
    expect_results();
    send_results();
    return;
  }
  const int tag = exchange_.tag(number_, SliceExchange::Leg::scatter);
  for_row([&](size_t host) {
    for (Column& column : columns_) {
      const size_t bytes = sum_bytes(share(column.number), host);
      if (bytes == 0) continue;
      char*& to = column.values[host - exchange_.grid().begin(row_)];
      to = staged(bytes);
      requests_.receive(to, bytes, exchange_.peer(host), tag, &receiving_);
    }
    for_columns_of(host, [&](size_t column) {
      const Share theirs = share(column);
      if (theirs.count() == 0) return;
      const char* values = own(theirs.begin);
      if (!wire.plain()) {
        char* encoded = staged(wire.bytes(theirs.count()));
        wire.encode(encoded, values, encode_arguments(theirs, SliceExchange::Leg::scatter, column));
        values = encoded;
      }
      requests_.send(values, sum_bytes(theirs, me()), exchange_.peer(host), tag, &sending_);
    });
  });
}

bool Chunk::step_exchange() {
  // Results overwrite the values that are being sent, so they are received only after the sends have ended.
  if (!expecting_ && sending_ == 0) {
    expect_results();
    return true;
  }
  if (step_ != Step::gather) {
    if (receiving_ > 0 || !is_next_use()) return false;
    switch (step_) {
      case Step::scatter:
        if (exchange_.grid().rows() > 1) {
          exchange_across();
          return true;
        }
        exchange_.stamp(Stamp::scattered);
        for (const Column& column : columns_) reduce_to_result(column);
        break;
      case Step::scatter_across:
        exchange_.stamp(Stamp::scattered);
        if (exchange_.reduces()) reduce_across();
        send_across();
        return true;
      case Step::gather_across:
      case Step::gather:
        break;
    }
    send_results();
    end_use();
    return true;
  }
  if (!expecting_ || results_ > 0 || sending_ > 0) return false;
  if (exchange_.spreads()) exchange_.stamp(Stamp::gathered);
  take_results();
  cursor_ = begin_;
  phase_ = exchange_.spreads() ? Phase::spread : Phase::finished;
  return true;
}

void Chunk::expect_results() {
  expecting_ = true;
  if (!exchange_.spreads() || is_complete(me())) return;
  const WireFormat& wire = exchange_.wire();
  for_row([&](size_t host) {
    for_columns_of(host, [&](size_t column) {
      const Share theirs = share(column);
      if (theirs.count() == 0) return;
      char* to = exchange_.result(theirs.begin);
      if (!wire.plain()) to = encoded_[column] = staged(wire.bytes(theirs.count()));
      requests_.receive(to, wire.bytes(theirs.count()), exchange_.peer(host),
                        exchange_.tag(number_, SliceExchange::Leg::gather), &results_);
    });
  });
}

// With one row: reduces the values of all hosts of a column.
void Chunk::reduce_to_result(const Column& column) {
  const Operation& op = exchange_.operation();
  const Share values = share(column.number);
  bool wide = false;
  for (size_t host = 0; host < exchange_.grid().width(row_); ++host) wide |= exchange_.sum_type(host) != op.dtype;
  char* const result = exchange_.result(values.begin);
  if (!wide || values.count() == 0) {
    reduce_values(values, column, op.dtype, result, op.scale);
    return;
  }
  const DType type = sum_type(op);
  char* const sum = staged(values.count() * item_size(type));
  reduce_values(values, column, type, sum, op.scale);
  convert(op.dtype, result, type, sum, values.count());
}

// Reduces the values of a row's hosts, in the order of the hosts, to values of `type`.
void Chunk::reduce_values(const Share& values, const Column& column, DType type, char* sum, double scale) {
  const WireFormat& wire = exchange_.wire();
  const Operation& op = exchange_.operation();
  const size_t width = item_size(op.dtype), hosts = exchange_.grid().width(row_), first = exchange_.grid().begin(row_);
  const bool as_they_are = wire.plain() && type == op.dtype;
  const size_t stride = as_they_are || !wire.divisible() ? values.count() : kDecodeBytes / width;
  std::vector<char*> decoded(hosts), converted(hosts);
  for (size_t host = 0; host < hosts; ++host) {
    if (!wire.plain() && column.values[host] != nullptr) decoded[host] = staged(stride * width);
    if (exchange_.sum_type(first + host) != type) converted[host] = staged(stride * item_size(type));
  }
  std::vector<const void*> inputs(hosts);
  for (size_t at = values.begin; at < values.end; at += stride) {
    const size_t some = std::min(stride, values.end - at);
    for (size_t host = 0; host < hosts; ++host) {
      const char* input = own(at);
      if (column.values[host] != nullptr) {
        input = wire.plain() ? column.values[host] + (at - values.begin) * item_size(exchange_.sum_type(first + host))
                             : wire.at(column.values[host], at - values.begin);
      }
      if (decoded[host] != nullptr) {
        wire.decode(decoded[host], input, some);
        input = decoded[host];
      }
      if (converted[host] != nullptr) {
        convert(type, converted[host], op.dtype, input, some);
        input = converted[host];
      }
      inputs[host] = input;
    }
    void* output = sum + (at - values.begin) * item_size(type);
    reduce(type, op.reduce_op, inputs.data(), static_cast<int>(inputs.size()), &output, 1, some, scale);
  }
}

// Reduces this host's columns over its row, without scaling, and exchanges the sums with the other rows.
void Chunk::exchange_across() {
  step_ = Step::scatter_across;
  const DType type = sum_type(exchange_.operation());
  const size_t width = item_size(type);
  const int tag = exchange_.tag(number_, SliceExchange::Leg::scatter);
  for (Column& column : columns_) {
    const Share own = share(column.number), kept = share(column.number, row_);
    if (own.count() == 0) continue;
    column.sum = staged(own.count() * width);
    reduce_values(own, column, type, column.sum, 1.0);
    std::fill(column.values.begin(), column.values.end(), nullptr);
    for_other_rows([&](size_t row) {
      const int peer = exchange_.peer(exchange_.grid().host(row, column.number));
      const Share theirs = share(column.number, row);
      if (kept.count() > 0) {
        column.values[row] = staged(kept.count() * width);
        requests_.receive(column.values[row], kept.count() * width, peer, tag, &receiving_);
      }
      const char* values = column.sum + (theirs.begin - own.begin) * width;
      requests_.send(values, theirs.count() * width, peer, tag, &sending_);
    });
  }
}

// Reduces the sums of all rows, in the order of the rows.
void Chunk::reduce_across() {
  const Operation& op = exchange_.operation();
  const DType type = sum_type(op);
  for (const Column& column : columns_) {
    const Share kept = share(column.number, row_);
    if (kept.count() == 0) continue;
    char* own = column.sum + (kept.begin - share(column.number).begin) * item_size(type);
    std::vector<const void*> inputs;
    for (size_t row = 0; row < exchange_.grid().rows(); ++row) inputs.push_back(row == row_ ? own : column.values[row]);
    char* result = exchange_.result(kept.begin);
    void* output = type == op.dtype ? result : own;
    reduce(type, op.reduce_op, inputs.data(), static_cast<int>(inputs.size()), &output, 1, kept.count(), op.scale);
    if (type != op.dtype) convert(op.dtype, result, type, own, kept.count());
  }
}

// Sends the results to the other rows, and receives theirs.
void Chunk::send_across() {
  step_ = Step::gather_across;
  const WireFormat& wire = exchange_.wire();
  const int tag = exchange_.tag(number_, SliceExchange::Leg::gather);
  for (Column& column : columns_) {
    const Share kept = share(column.number, row_);
    const char* values = outgoing(kept, column.number);
    column.results.resize(exchange_.grid().rows());
    for_other_rows([&](size_t row) {
      const size_t host = exchange_.grid().host(row, column.number);
      const int peer = exchange_.peer(host);
      const Share theirs = share(column.number, row);
      if (theirs.count() > 0 && !is_complete(me())) {
        char* to = exchange_.result(theirs.begin);
        if (!wire.plain()) to = column.results[row] = staged(wire.bytes(theirs.count()));
        requests_.receive(to, wire.bytes(theirs.count()), peer, tag, &receiving_);
      }
      if (!is_complete(host)) requests_.send(values, wire.bytes(kept.count()), peer, tag, &sending_);
    });
  }
}

// Sends the results of this host's columns to the other hosts of its row.
void Chunk::send_results() {
  step_ = Step::gather;
  if (!exchange_.spreads()) return;
  const WireFormat& wire = exchange_.wire();
  for (const Column& column : columns_) {
    for (size_t row = 0; row < column.results.size(); ++row) {
      const Share theirs = share(column.number, row);
      if (column.results[row] != nullptr)
        wire.decode(exchange_.result(theirs.begin), column.results[row], theirs.count());
    }
    const Share own = share(column.number);
    if (own.count() == 0) continue;
    const char* values = outgoing(own, column.number);
    exchange_.stamp_once(Stamp::gather);
    for_row([&](size_t host) {
      if (is_complete(host)) return;
      requests_.send(values, wire.bytes(own.count()), exchange_.peer(host),
                     exchange_.tag(number_, SliceExchange::Leg::gather), &results_);
    });
  }
}

// Encodes results. This host decodes them too, since it must continue with the same bits as the hosts that receive
// them.
const char* Chunk::outgoing(const Share& values, size_t column) {
  const WireFormat& wire = exchange_.wire();
  char* result = exchange_.result(values.begin);
  if (wire.plain() || values.count() == 0) return result;
  char* encoded = staged(wire.bytes(values.count()));
  wire.encode(encoded, result, encode_arguments(values, SliceExchange::Leg::gather, column));
  wire.decode(result, encoded, values.count());
  return encoded;
}

void Chunk::take_results() {
  for (size_t column = 0; column < encoded_.size(); ++column) {
    if (encoded_[column] == nullptr) continue;
    const Share theirs = share(column);
    exchange_.wire().decode(exchange_.result(theirs.begin), encoded_[column], theirs.count());
  }
}

bool Chunk::step(bool spreading_too) {
  // The amount of work between two polls of the network.
  const size_t bytes = piece_bytes(exchange_.world().local_size());
  const size_t stop = std::min(end_, cursor_ + bytes / item_size(exchange_.operation().dtype));
  switch (phase_) {
    case Phase::reduce_on_host:
      if (sums_ == nullptr) {
        exchange_.reduce_on_host(cursor_, stop);
      } else {
        exchange_.reduce_on_host(cursor_, stop, sums_ + (cursor_ - begin_) * item_size(exchange_.sum_type(me())));
      }
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
