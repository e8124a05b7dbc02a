// Messages from the first rank of a host to other hosts about operations. Messages that are ready at the same time are
// sent as one.
#pragma once

#include <mpi.h>

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "agreement/host_tree.h"
#include "agreement/messages.h"
#include "base/mpi_check.h"
#include "world/world.h"

namespace mykv {

// Messages to other ranks that are being sent. Their bytes are kept until MPI no longer reads them.

class Sendings {
 public:
  using Bytes = std::shared_ptr<const std::vector<char>>;

  explicit Sendings(MPI_Comm comm) : comm_(comm) {}
  Sendings(const Sendings&) = delete;
  Sendings& operator=(const Sendings&) = delete;
  ~Sendings();

  void send(Bytes bytes, int to, int tag);
  // Continues the sends, and drops the messages that have been sent.
  void progress();
  bool empty() const { return all_.empty(); }

 private:
  struct Sending {
    Bytes bytes;
    MPI_Request request;
  };
  MPI_Comm comm_;
  std::list<Sending> all_;
};

class Outbox {
 public:
  Outbox(const World& world, const HostTree& tree, int tag)
      : world_(world), tree_(tree), tag_(tag), sendings_(world.control()) {}

  // To the host above. A message that may wait is sent with the next message that may not wait, or by send_ready().
  void up(const Message& message, bool may_wait);
  // To the hosts below.
  void down(const Message& message);
  // To rank 0. Any rank may call it.
  void to_rank_0(const Message& message);
  // Sends a message directly to all hosts that are not children of this host, after the messages of down().
  void past_children(const Message& message);
  // Sends the messages that are ready. Returns whether any were sent. With `may_hold`, messages that may wait are kept
  // for up to 200 us.
  bool send_ready(bool may_hold);
  // The number of messages that are held back.
  size_t held() const { return held_; }
  // Whether messages are still being sent.
  bool sending() const { return !(sendings_.empty() && up_.empty() && down_.empty() && direct_.empty()); }
  const Traffic& sent() const { return traffic_; }

 private:
  void send(Sendings::Bytes bytes, int to);
  bool holds() const;

  const World& world_;
  const HostTree& tree_;
  const int tag_;
  std::vector<char> up_;
  std::vector<char> down_;
  std::vector<char> direct_;  // messages for rank 0
  size_t held_ = 0;           // number of messages in up_ if all of them may wait; otherwise 0
  int64_t held_since_ = 0;    // since when messages in up_ are held back; now_ns()
  Sendings sendings_;
  Traffic traffic_;
};

}  // namespace mykv
