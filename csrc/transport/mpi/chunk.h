// A chunk of a slice and its state: a state machine that never blocks.
#pragma once

#include "transport/mpi/requests.h"
#include "transport/mpi/slice_exchange.h"

namespace mykv {

class Chunk {
 public:
  Chunk(SliceExchange& exchange, uint32_t number, MpiRequests& requests, Staging& staging);
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;

  // Call it once, before the first step().
  void begin();
  // Does one step of work; false if none is due. Without `spreading_too` only work that other hosts wait for.
  bool step(bool spreading_too);
  bool finished() const { return phase_ == Phase::finished; }
  SliceExchange& exchange() const { return exchange_; }
  // Estimate of the chunk's staging memory in bytes.
  size_t bytes() const { return (end_ - begin_) * item_size(exchange_.sum_type(me())); }
  // Releases the staging memory. No message may be under way.
  void release();

 private:
  enum class Phase { reduce_on_host, exchange, spread, finished };
  // The steps of the exchange. With one row there are only the steps `scatter` and `gather`.
  enum class Step { scatter, scatter_across, gather_across, gather };

  struct Share {
    size_t begin;
    size_t end;
    size_t count() const { return end - begin; }
  };
  // A column that this host reduces.
  struct Column {
    size_t number;
    // Encoded values of the row's hosts, then sums of the other rows; null: this host's values.
    std::vector<char*> values;
    char* sum = nullptr;           // several rows: the sum of this row
    std::vector<char*> results{};  // encoded sums of the other rows; null if WireFormat::plain()
  };
  Share share(size_t column) const;
  Share share(size_t column, size_t row) const;
  size_t me() const { return static_cast<size_t>(exchange_.world().host()); }
  template <class Use>
  void for_row(Use&& use) const;
  template <class Use>
  void for_other_rows(Use&& use) const;
  template <class Use>
  void for_columns_of(size_t host, Use&& use) const;

  bool is_complete(size_t host) const;
  void begin_exchange();
  void begin_broadcast();
  bool step_exchange();
  void expect_results();
  void reduce_to_result(const Column& column);
  void reduce_values(const Share& values, const Column& column, DType type, char* sum, double scale);
  void exchange_across();
  void reduce_across();
  void send_across();
  void send_results();
  const char* outgoing(const Share& values, size_t column);
  void take_results();
  const char* own(size_t element) const;
  size_t sum_bytes(const Share& values, size_t host) const;
  char* staged(size_t bytes);
  // `owner`: owner of the values' column.
  WireFormat::EncodeArguments encode_arguments(const Share& values, SliceExchange::Leg leg, size_t owner) const;
  bool is_next_use() const;
  void end_use() const;

  SliceExchange& exchange_;
  uint32_t number_;
  MpiRequests& requests_;
  Staging& staging_;
  size_t begin_;
  size_t end_;
  size_t cursor_;
  Phase phase_;
  Step step_ = Step::scatter;
  const size_t row_;
  uint32_t use_ = 0;        // the number of this use, from CompressionState::take_use()
  bool expecting_ = false;  // results of the row's other hosts are being received
  size_t sending_ = 0;      // messages under way: this host's values ...
  size_t receiving_ = 0;    // ... other hosts' values of this host's columns, then results of the other rows ...
  size_t results_ = 0;      // ... and results of the row, both ways
  char* sums_ = nullptr;    // sums of this host, if they are not in this rank's slot
  std::vector<Staging::Block> blocks_;
  std::vector<Column> columns_;
  std::vector<char*> encoded_;  // by column: encoded results of other hosts; null if WireFormat::plain()
};

}  // namespace mykv
