// How several hosts agree on what is ready everywhere, and in which order it runs. The first rank of each host
// announces to rank 0 each operation at which all ranks of its host have arrived. Once every host has announced an
// operation, rank 0 sends all hosts a verdict: a position in the common order, or the reason why it cannot run.
//
// Verdicts are given for as many bytes as keep the network busy. Further operations wait at rank 0, and the highest
// priority goes first. So the gradients that the next step needs first overtake earlier ones, and memory for operations
// under way is bounded, while all hosts keep one order.
//
// Any rank may ask rank 0 to give an operation up. Rank 0 then tells all hosts to end it, unless all have announced it:
// an operation runs on all hosts or on none. A host on which no rank has arrived yet ignores this, and is told again
// when it announces the operation.
//
// Messages that are ready at the same time are sent as one. Texts are sent once for each operation, later their number.
#pragma once

#include <mpi.h>

#include <atomic>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "agreement/inbox.h"
#include "agreement/known_texts.h"
#include "agreement/late_hosts.h"
#include "agreement/messages.h"
#include "table/host_table.h"
#include "timeline/records.h"
#include "world/world.h"

namespace mykv {

class Agreement {
 public:
  // `most_bytes`: limit for all operations that have their verdict and are not done.
  Agreement(const World& world, HostTable& table, size_t most_bytes)
      : world_(world),
        table_(table),
        most_bytes_(most_bytes),
        inbox_(world.control(), kTag),
        observed_{{}, LateHosts(world)} {}
  ~Agreement();

  // Whether this rank speaks for its host.
  bool speaks() const { return world_.hosts().size() > 1 && world_.local_rank() == 0; }
  // All ranks of this host have arrived at the entry, which takes `places` sequence numbers.
  void announce(uint32_t entry, uint32_t places);
  // An operation that was agreed on under this sequence number is done on this host.
  void done(uint64_t sequence);
  // A rank of this host or of another host has left.
  void depart(int rank, const Cause& reason);
  // The same, called by any rank that breaks down: it only tells rank 0, or as rank 0 the other hosts.
  void depart_alone(int rank, const Cause& reason);
  // Sends, receives and answers; false if there was nothing to do.
  bool progress();
  // Any rank may call give_up() and progress_sending(), also a rank that does not speak for its host. give_up() asks
  // for the end of an operation on all hosts, unless all have announced it. progress_sending() moves messages on.
  void give_up(const Key& key, const Cause& reason);
  void progress_sending();
  // For the timeline of rank 0: when each host, named by its first rank, announced the operation. Forgets the times.
  std::vector<ArrivalRecord> take_arrivals(const Key& key);
  // On rank 0: how late ranks were, of all hosts. Thread-safe.
  std::vector<LateRank> late_ranks() { return observed_.late.ranks(); }
  // Whether verdicts are outstanding or messages are being sent: poll often.
  bool polling() const { return !outstanding_.empty() || sending(); }
  // Whether rank 0 has told this host that a rank has left; rank 0 then needs no word about it from this host.
  bool closed() const { return closed_; }
  // Whether messages are still on their way out.
  bool sending() const { return !sending_.empty() || !news_.empty() || !news_for_all_.empty(); }
  // No message is under way, in either direction.
  bool quiet() const { return !sending() && inbox_.quiet(); }

  // What was sent to and received from other hosts.
  struct Traffic {
    void add(size_t some) {
      messages.fetch_add(1, std::memory_order_relaxed);
      bytes.fetch_add(some, std::memory_order_relaxed);
    }
    std::atomic<uint64_t> messages{0};
    std::atomic<uint64_t> bytes{0};
  };
  const Traffic& sent() const { return traffic_.sent; }
  const Traffic& received() const { return traffic_.received; }

 private:
  using KeyNumbers = std::pair<uint64_t, uint64_t>;
  struct Pending {
    size_t hosts = 0;
    uint64_t text = 0;  // number of the texts of the first host that announced, see KnownTexts
    int rank = 0;       // label of that host's first rank
    Cause error;
    int32_t priority = 0;
    uint32_t places = 1;
    size_t bytes = 0;        // of network memory
    uint64_t placement = 0;  // sum over the hosts
    std::vector<ArrivalRecord> arrivals;
    HostsMeeting meeting;
  };
  // An operation that is ready on all hosts and has no verdict yet. ready_ has them by falling priority, then in the
  // order in which they became ready.
  struct Ready {
    Key key;
    Pending pending;
  };

  struct GivenUp {
    Cause reason;
    std::set<int> left;  // first ranks of the hosts that have not ended it
  };

  void tell_root(const Message& message);
  void tell_all(const Message& message);
  void flush();
  void send(std::shared_ptr<const std::vector<char>> bytes, int to);
  void handle(const Message& message, int from);
  void collect(const Message& message, int from);
  void give_verdicts();
  void decide_end(const Message& message);
  void tell_end(const Key& key);
  void end(const Message& message);
  void give_verdict(const Key& key, uint64_t sequence, const Cause& error, uint64_t placement = 0);

  static constexpr int kTag = 1;

  const World& world_;
  HostTable& table_;
  const size_t most_bytes_;
  Inbox inbox_;
  std::set<KeyNumbers> outstanding_;   // announced, without a verdict
  std::vector<char> news_;             // for rank 0
  std::vector<char> news_for_all_;     // from rank 0
  std::unordered_set<uint64_t> told_;  // numbers of the texts that this host has sent to rank 0
  bool closed_ = false;                // no more operation is agreed on
  struct Sending {
    std::shared_ptr<const std::vector<char>> bytes;
    MPI_Request request;
  };
  std::list<Sending> sending_;
  struct {
    Traffic sent, received;
  } traffic_;

  // Used by rank 0 only.
  uint64_t next_sequence_ = 1;
  std::map<KeyNumbers, Pending> pending_;
  std::map<std::pair<int64_t, uint64_t>, Ready> ready_;
  uint64_t ready_count_ = 0;
  std::map<KeyNumbers, GivenUp> given_up_;
  struct {
    std::map<uint64_t, size_t> bytes;  // by sequence number
    size_t all_bytes = 0;
  } under_way_;
  KnownTexts texts_;
  struct {
    std::map<KeyNumbers, std::vector<ArrivalRecord>> arrivals;  // of operations that were agreed on
    LateHosts late;
  } observed_;
  Cause departed_;
};

}  // namespace mykv
