// A chunk of a slice and its state: a state machine that never blocks.
#pragma once

#include "transport/mpi/requests.h"
#include "transport/mpi/slice_exchange.h"
#include "transport/mpi/staging.h"

namespace mykv {

class Chunk {
 public:
  Chunk(SliceExchange& exchange, uint32_t number, MpiRequests& requests, Staging& staging);
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;

  // Call it once, before the first step().
  void begin();
  // Does one piece of work; false if none is due. Without `spreading_too` it does only work that other hosts wait for.
  bool step(bool spreading_too);
  bool finished() const { return phase_ == Phase::finished; }
  SliceExchange& exchange() const { return exchange_; }
  // About the staging memory that this chunk takes.
  size_t bytes() const { return (end_ - begin_) * item_size(exchange_.operation().dtype); }
  // Gives its staging memory back; no message may be under way any more.
  void release();

 private:
  enum class Phase { reduce_on_host, exchange, spread, finished };

  struct HostShare {
    size_t begin;
    size_t end;
    size_t count() const { return end - begin; }
  };
  HostShare host_share(size_t host) const;
  HostShare mine() const { return host_share(static_cast<size_t>(exchange_.world().host())); }
  template <class Use>
  void for_others(Use&& use) const;

  bool step_exchange();
  void begin_exchange();
  void expect_results();
  void reduce_own_share();
  void send_result();
  void take_results();
  char* staged(size_t bytes);
  // `owner`: the host whose share the values are in.
  WireFormat::Place place(const HostShare& values, SliceExchange::Leg leg, size_t owner) const;
  bool is_turn() const;
  void end_turn() const;

  SliceExchange& exchange_;
  uint32_t number_;
  MpiRequests& requests_;
  Staging& staging_;
  size_t begin_;
  size_t end_;
  size_t cursor_;
  Phase phase_;
  uint32_t ticket_ = 0;     // from CompressionState::take_ticket()
  bool reduced_ = false;    // the own share is reduced, and its result is being sent
  bool expecting_ = false;  // results of other hosts are being received
  size_t sending_ = 0;      // messages under way: this host's values ...
  size_t receiving_ = 0;    // ... other hosts' values of the own share ...
  size_t results_ = 0;      // ... and results, both ways
  std::vector<Staging::Block> blocks_;
  std::vector<char*> received_;  // values of each host for the own share, as they travel
  std::vector<char*> encoded_;   // each host's result as it travels, if that differs from memory
};

}  // namespace mykv
