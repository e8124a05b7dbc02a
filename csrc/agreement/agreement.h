// How several hosts agree on what is ready everywhere, and in which order it runs. The first rank of each host
// announces to rank 0 each operation at which all ranks of its host have arrived. Once every host has announced an
// operation, rank 0 sends all hosts a verdict: a position in the common order, or the reason why it cannot run.
//
// Rank 0 gives verdicts only for as many bytes as keep the network busy. Further operations wait at rank 0, and the
// highest priority goes first. So the gradients that the next step needs first overtake earlier ones, and memory for
// operations under way is bounded, while all hosts keep one order.
//
// Any rank may ask rank 0 to give an operation up. Rank 0 then tells all hosts to end it, unless all have announced it:
// an operation runs on all hosts or on none. A host on which no rank has arrived yet ignores this, and is told again
// when it announces the operation.
//
// A small operation (Transport::is_carried) needs no further messages: the announcements carry the sums of the hosts,
// the verdict the result. The sums are combined in the order of the hosts. In a tree of several levels, each host first
// combines its own sum and its children's.
//
// The messages go through a tree of hosts (host_tree.h). A host in the middle announces an operation when all hosts
// below it have announced it; verdicts and ends go down the same way, so that every host sees them in one order. A rank
// that breaks down passes on no more messages, so rank 0 tells every host of it directly. The host of the broken-down
// rank may miss verdicts that other hosts have received. An operation in slices then fails on the other hosts too,
// through a notice (transport/mpi). A carried operation has its result on the hosts with the verdict, and an error on
// the other hosts.
//
// Names and signatures are sent once, and later messages carry only their number. They are sent again after many other
// names and signatures (KnownTexts).
#pragma once

#include <mpi.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "agreement/host_tree.h"
#include "agreement/inbox.h"
#include "agreement/messages.h"
#include "agreement/outbox.h"
#include "table/entry.h"
#include "table/host_table.h"
#include "timeline/records.h"
#include "world/world.h"

namespace mykv {

// For the statistics of rank 0: which rank came last to the operations of several hosts, and how long the other ranks
// waited for it. The announcement of a host says which of its ranks came last. Rank 0's clock shows which announcement
// came last.

// How many hosts have announced one operation, and when, as this rank sees it. A branch is one host, or a host with all
// hosts below it.
struct HostsMeeting {
  int64_t first = 0;   // when the first branch announced; now_ns()
  int64_t later = 0;   // sum over ranks: how long after `first` their branch announced
  int64_t waited = 0;  // sum over ranks: how long they waited for the last rank of their branch
  int last = -1;       // the rank that came last in the branch that announced last
  bool ends_step = false;
};

// Thread-safe.
class LateHosts {
 public:
  LateHosts(const World& world, const HostTree& tree) : world_(world), tree_(tree) {}

  // A branch has announced the operation. Changes only `meeting`.
  void announced(HostsMeeting* meeting, const Message& message, size_t branch, int64_t now) const;
  // The total time that the ranks of all branches have waited, if the last announcement came at `now`.
  int64_t waited(const HostsMeeting& meeting, int64_t now) const;
  // Counts an operation that all hosts have announced.
  void complete(const HostsMeeting& meeting, int64_t now);
  std::vector<LateRank> ranks();

 private:
  const World& world_;
  const HostTree& tree_;
  std::mutex mutex_;
  std::map<int, Lateness> of_;  // how late each rank was, by rank
};

// Names and signatures that other hosts have sent, by the number of the pair. Old pairs are dropped.

class KnownTexts {
 public:
  // A rank sends a pair again before it has sent this many other pairs.
  static constexpr size_t kRemembered = 1 << 13;

  struct Texts {
    std::string name;
    std::string signature;
  };

  void add(uint64_t number, Texts texts) {
    if (recent_.size() >= 2 * kRemembered) {
      old_ = std::move(recent_);
      recent_.clear();
    }
    recent_[number] = std::move(texts);
  }
  Texts get(uint64_t number) const {
    for (const auto* some : {&recent_, &old_}) {
      const auto found = some->find(number);
      if (found != some->end()) return found->second;
    }
    return {"an operation", "another signature"};
  }

 private:
  std::unordered_map<uint64_t, Texts> recent_;
  std::unordered_map<uint64_t, Texts> old_;
};

class Agreement {
 public:
  // `most_bytes`: limit for all operations that have their verdict and are not done. `fan_out`: the fan-out of the
  // tree.
  Agreement(const World& world, HostTable& table, size_t most_bytes, size_t fan_out);

  // Whether this rank is the one that sends and receives the agreement's messages for its host.
  bool speaks() const { return world_.has_several_hosts() && world_.local_rank() == 0; }
  // All ranks of this host have arrived at the entry, which uses `sequence_numbers` numbers. `carried`: this host's
  // contribution to a carried operation: its sum; for a broadcast, the values on the root's host, and nothing on other
  // hosts. `error`: why the operation failed on this host; empty: it did not fail.
  void announce(uint32_t entry, uint32_t sequence_numbers, std::optional<std::vector<char>> carried, Failure error);
  // Returns and forgets the result of a carried operation that has its verdict.
  std::vector<char> take_result(const Key& key);
  // An operation that was agreed on under this sequence number is done on this host.
  void done(uint64_t sequence);
  // A rank of this host or of another host has left.
  void depart(int rank, const Failure& reason);
  // The same for a rank that breaks down, or that ends before rank 0 has answered. This rank tells only rank 0 and the
  // hosts below its host, and rank 0 tells all hosts.
  void depart_alone(int rank, const Failure& reason);
  // Sends, receives and answers; false if there was nothing to do.
  bool progress();
  // Any rank may call give_up() and progress_sending(), even if it does not speak for its host. give_up() asks
  // rank 0 to end an operation on all hosts, unless all have announced it. progress_sending() moves messages on.
  void give_up(const Key& key, const Failure& reason);
  void progress_sending();
  // For the timeline of rank 0: when each host, named by its first rank, announced the operation for itself and the
  // hosts below it. The agreement then forgets the times.
  std::vector<ArrivalRecord> take_arrivals(const Key& key);
  // On rank 0: how late the ranks of all hosts were. Thread-safe.
  std::vector<LateRank> late_ranks() { return observed_.late.ranks(); }
  // Whether verdicts are outstanding or messages are being sent: poll often.
  bool polling() const { return outstanding_.count() > 0 || sending(); }
  // Whether rank 0 has told this host that a rank has left; then this host need not tell rank 0.
  bool closed() const { return closed_; }
  // Whether messages are still being sent.
  bool sending() const { return outbox_.sending(); }
  // Whether this host is sending no message, and every message that it has begun to receive is complete.
  bool quiet() const { return !sending() && inbox_.quiet(); }
  const Traffic& sent() const { return outbox_.sent(); }
  const Traffic& received() const { return received_; }

 private:
  using KeyNumbers = std::pair<uint64_t, uint64_t>;
  // This host's announcements that have no verdict yet.
  class Outstanding {
   public:
    void add(const KeyNumbers& key, bool carried) {
      if (is_carried_.emplace(key, carried).second) carried_ += carried;
    }
    bool remove(const KeyNumbers& key) {
      const auto it = is_carried_.find(key);
      if (it == is_carried_.end()) return false;
      carried_ -= it->second;
      is_carried_.erase(it);
      return true;
    }
    void clear() { *this = {}; }
    size_t count() const { return is_carried_.size(); }
    size_t carried() const { return carried_; }

   private:
    std::map<KeyNumbers, bool> is_carried_;
    size_t carried_ = 0;
  };
  // An operation that some branches of the tree have announced, see HostTree::branches().
  struct Pending {
    size_t branches = 0;
    uint64_t text = 0;  // number of the texts of the first branch that announced, see KnownTexts
    int rank = 0;       // label of that branch's first rank
    Failure error;
    int32_t priority = 0;
    uint32_t sequence_numbers = 1;
    size_t bytes = 0;        // bytes that the operation occupies in network memory
    uint64_t placement = 0;  // sum of the branches' digests
    std::optional<Operation> carried;
    std::vector<std::vector<char>> values;  // values of a carried operation, by branch
    std::vector<ArrivalRecord> arrivals;
    HostsMeeting meeting;
  };
  // An operation that is ready on all hosts and has no verdict yet. ready_ has them by descending priority, then in the
  // order in which they became ready.
  struct Ready {
    Key key;
    Pending pending;
  };

  struct GivenUp {
    Failure reason;
    std::set<int> left;  // first ranks of the branches that have not ended the operation
  };

  bool send_ready();
  void handle(Message message, int from);
  void collect(Message message, int from);
  void announce_part(const Key& key, const Pending& pending, int64_t now);
  void decide(const Key& key, Pending pending, int64_t now);
  std::vector<char> combined(const Pending& pending, bool whole) const;
  void take_verdict(Message message);
  void give_verdicts();
  void give_verdict(const Key& key, uint64_t sequence, const Pending& of, const Failure& error);
  void depart(const Message& message);
  void decide_end(const Message& message);
  void tell_end(const Key& key, const Failure& reason, bool again);
  void end(const Message& message);
  void take_ended(const Message& message, int from);

  static constexpr int kTag = 1;

  const World& world_;
  HostTable& table_;
  const size_t most_bytes_;
  const HostTree tree_;
  Inbox inbox_;
  Outbox outbox_;
  Traffic received_;
  Outstanding outstanding_;
  std::map<KeyNumbers, Pending> pending_;
  // If a message about an end comes late, an entry may stay here until the runtime ends. That is harmless, since keys
  // never repeat: turns count up, and a name is not used again after forget()
  // (kvstore_plugin/coordination/operation_names.py).
  std::map<KeyNumbers, GivenUp> given_up_;
  std::map<KeyNumbers, std::vector<char>> results_;  // results of carried operations
  KnownTexts texts_;
  struct {
    std::unordered_set<uint64_t> here;   // numbers of this host's texts that texts_ has
    std::unordered_set<uint64_t> above;  // numbers of the texts that the host above has received
  } told_;
  bool closed_ = false;  // no more operations are agreed on

  // Used by rank 0 only.
  uint64_t next_sequence_ = 1;
  std::map<std::pair<int64_t, uint64_t>, Ready> ready_;
  uint64_t ready_count_ = 0;
  struct {
    std::map<uint64_t, size_t> bytes;  // bytes of each operation under way, by sequence number
    size_t all_bytes = 0;
    bool is_full = false;
  } under_way_;
  struct {
    std::map<KeyNumbers, std::vector<ArrivalRecord>> arrivals;  // of operations that were agreed on
    LateHosts late;
  } observed_;
  Failure departed_;
};

}  // namespace mykv
