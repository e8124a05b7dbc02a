// Several hosts: shared memory within each host, MPI between hosts. An operation is cut into as many slices as the
// smallest host has ranks. The n-th rank of each host owns slice n: it reduces the slice over its own host, exchanges
// it with the owners of slice n on the other hosts, and writes the result into every slot of its host. So every rank
// drives the network at the same time.
//
// Between hosts a slice is reduced by a direct reduce-scatter and allgather: each host gets its share of the slice from
// all other hosts, reduces it in the order of the hosts, and sends the result to all. A single host computes each
// share, so the bits are the same everywhere. (Rabenseifner, "Optimization of collective reduction operations", 2004,
// uses steps of powers of two; with direct sends each value also crosses the network twice.) Many hosts do the same in
// the rows and then in the columns of a grid (HostGrid), which takes fewer messages.
//
// Slices travel in chunks, so that reducing on the host, both directions of the network and writing to the slots
// overlap. Chunks start in the order that the hosts agreed on. Their number is limited, and so is the memory for values
// that they receive. The first unfinished chunk is under way on all hosts, so hosts that wait for memory cannot
// deadlock.
//
// An operation of few bytes has no slices: the agreement's messages carry it (agreement/agreement.h).
//
// A rank that breaks down sends a notice to the owners of its slice on the other hosts. A rank that receives a notice
// while it has operations under way breaks down too: its own notices, and its changes of the host's table, pass the
// failure on to all ranks that wait.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "agreement/inbox.h"
#include "transport/host/slots.h"
#include "transport/mpi/chunk.h"
#include "transport/transport.h"

namespace mykv {

class MpiTransport : public Transport {
 public:
  MpiTransport(const World& world, HostTable& table, const NetworkOptions& options);
  ~MpiTransport() override;
  int32_t owner(const Operation&, uint64_t) const override { return kAnybody; }
  bool taken_from_root(const Operation&) const override { return false; }
  uint32_t pieces(const Operation& operation) const override { return is_carried(operation) ? 1 : slices_; }
  uint32_t sequence_numbers(const Operation& operation) const override {
    if (is_carried(operation)) return 1;
    return SliceExchange::chunks(operation, slices_, grid_of(operation));
  }
  size_t inline_limit() const override { return 0; }
  void run_whole(uint32_t) const override {}
  bool is_carried(const Operation& operation) const override;
  bool own_share(uint32_t entry, std::vector<char>* values) const override;
  void put_result(uint32_t entry, const std::vector<char>& values) override;
  void start(uint32_t entry, const LocalShare& share) override;
  void stop(uint32_t) override {}
  bool progress() override;
  bool polling() const override { return !exchanges_.empty(); }
  std::array<uint64_t, 4> traffic() const override {
    const Traffic &sent = requests_.sent(), &received = requests_.received();
    return {sent.messages, sent.bytes, received.messages, received.bytes};
  }
  bool quiet() const override {
    return exchanges_.empty() && requests_.empty() && notice_.requests.empty() && notices_.quiet();
  }
  bool holds(uint32_t entry) const override;
  void note_departed(const Departed& departed) override;
  bool uses_no_memory() override;

 private:
  static constexpr int kNoticeTag = 4;  // a tag of the world's communicator for small messages

  HostGrid grid_of(const Operation& operation) const;
  void hear();
  void require_all();
  bool step_chunks(bool spreading_too);
  bool admit();
  void finish(size_t chunk);

  const World& world_;
  HostTable& table_;
  Slots slots_;
  struct Most {
    size_t under_way;  // bytes of chunks under way
    size_t carried;    // bytes of a carried operation
    size_t in_a_row;   // hosts in one row
  };
  const Most most_;
  uint32_t slices_;
  MpiRequests requests_;
  Staging staging_;
  std::deque<std::unique_ptr<SliceExchange>> exchanges_;  // exchanges in the order that the hosts agreed on
  std::vector<std::unique_ptr<Chunk>> chunks_;            // chunks under way, in the same order
  size_t chunk_bytes_ = 0;                                // bytes of the chunks under way
  uint32_t next_chunk_ = 0;                               // the number of the chunk that starts next ...
  size_t entering_ = 0;                                   // ... and its exchange: index in exchanges_

  Inbox notices_;
  std::set<int> gone_;                // ranks that have sent a notice
  std::optional<Departed> departed_;  // from the first notice
  int64_t looked_ = 0;        // when this rank last looked at the network; coarse_now_ns(), like the next two members
  int64_t heard_at_ = 0;      // when this rank last looked for notices
  int64_t listen_until_ = 0;  // until this time this rank only checks for notices
  struct Notice {
    std::vector<char> bytes;
    std::vector<MPI_Request> requests;
  };
  Notice notice_;         // the notice that this rank sends
  bool dropped_ = false;  // the chunks that this rank claimed were dropped
};

}  // namespace mykv
