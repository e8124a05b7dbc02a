// How several hosts agree on what is ready everywhere, and in which order it runs. The first rank of each host
// announces to rank 0 what is complete on its host; rank 0 answers all hosts with a verdict once every host has
// announced: a place in the common order, or the sentence that says why the operation cannot run.
#pragma once

#include <mpi.h>

#include <list>
#include <map>
#include <string>
#include <vector>

#include "runtime/rendezvous.h"
#include "runtime/timeline.h"
#include "runtime/world.h"

namespace mykv {

class Agreement {
 public:
  Agreement(const World& world, Rendezvous& rendezvous) : world_(world), rendezvous_(rendezvous) {}

  // This rank speaks for its host.
  bool speaks() const { return world_.hosts().size() > 1 && world_.local_rank() == 0; }
  // All ranks of this host have arrived at the entry.
  void announce(uint32_t entry);
  // A rank of this host has left, or of another one.
  void depart(int rank, const std::string& reason);
  // Receives and answers; false when there was nothing.
  bool progress();
  // For the timeline of rank 0: when it heard of which host, named by its first rank. Forgets it.
  std::vector<ArrivalRecord> take_arrivals(const Key& key);
  // Answers are outstanding: look often.
  bool polling() const { return outstanding_ > 0 || !sending_.empty(); }
  // Messages that are still on their way out.
  bool sending() const { return !sending_.empty(); }

 private:
  struct Message;
  struct Pending {
    size_t hosts = 0;
    uint64_t signature_hash = 0;
    std::string name;
    std::string signature;  // of the first host that announced
    int rank = 0;           // its first rank, as messages call it
    std::string error;
    std::vector<ArrivalRecord> arrivals;
  };

  void send(const Message& message, int to);
  void handle(const Message& message, int from);
  void collect(const Message& message, int from);

  const World& world_;
  Rendezvous& rendezvous_;
  uint64_t outstanding_ = 0;
  uint64_t next_sequence_ = 1;  // rank 0 only, as is pending_
  std::map<std::pair<uint64_t, uint64_t>, Pending> pending_;
  std::map<std::pair<uint64_t, uint64_t>, std::vector<ArrivalRecord>> arrivals_;  // of what was agreed on
  std::string departed_;
  bool closed_ = false;  // nothing more is agreed on
  struct Sending {
    std::vector<char> bytes;
    MPI_Request request;
  };
  std::list<Sending> sending_;
};

}  // namespace mykv
