// Finds the ranks that this rank's operations wait for. The host's table knows its own ranks. Other hosts are asked on
// demand, so that an operation that does not wait costs only a read of a coarse clock.
#pragma once

#include <string>
#include <vector>

#include "runtime/requests.h"
#include "runtime/thread_commands.h"
#include "runtime/turns.h"
#include "table/host_table.h"
#include "world/world.h"

namespace mykv {

class World;

// An operation that waits, and the ranks that it waits for.
struct Waiting {
  std::string name;
  std::string shown;              // the name in messages
  double seconds = 0;             // since this rank has arrived
  bool complete = false;          // all ranks have arrived, but there is no result
  std::string lack;               // with crowded_out: why there is no memory for more entries, if that is the cause
  bool crowded_out = false;       // this rank has not arrived: its host's table is full; see `missing`
  std::vector<int> missing;       // ranks that have not arrived; if crowded_out: at the operations that fill the table
  std::vector<int> unresponsive;  // ranks without a heartbeat for a few seconds
  std::vector<int> unknown;       // ranks of hosts that do not answer
};

// Whether a rank is among `ranks`.
bool holds(const std::vector<int>& ranks, int rank);

// Whether this rank reports the operation: true for the lowest rank that waits and responds, and for the lowest such
// rank of a host whose first rank does not respond.
bool speaks_of(const Waiting& waiting, const World& world);

// 'rank 3', 'ranks 1, 2 and 5', with the labels of the ranks; shortened if there are many.
std::string ranks_text(const std::vector<int>& ranks, const World& world);

// The ranks that an operation waits for.
std::vector<int> culprits(const Waiting& waiting);

// 'rank 1, which has not arrived and does not respond (is it stopped?)': the culprits() and what is wrong with them.
std::string culprits_text(const Waiting& waiting, const World& world);

// Thread-safe. The runtime's thread must not call it, since that thread sends the questions to other hosts.
class LateRanks {
 public:
  LateRanks(const World& world, HostTable& table, Requests& requests, Turns& turns, ThreadCommands& commands)
      : world_(world), table_(table), requests_(requests), turns_(turns), commands_(commands) {}

  // How long the oldest operation has waited, in seconds; 0: no operation waits.
  double longest_wait();
  // Operations that have waited for `least_seconds`, the oldest first; only those under `name`, unless it is empty.
  // With several hosts this asks the other hosts, which takes a few seconds if a host does not answer.
  std::vector<Waiting> waiting(double least_seconds, const std::string& name);
  // For each name: the ranks that wait in this rank's next operation under that name, which this rank has not started.
  // With `turn_of`: in the operation with the last turn under `turn_of`. Asks other hosts like waiting().
  std::vector<std::vector<int>> waiting_for_this(const std::vector<std::string>& names, const std::string& turn_of);

 private:
  std::vector<Waiting> waiting_here(double least_seconds, const std::string& name);
  void add_other_hosts(const std::vector<Key>& asked, const std::vector<size_t>& asked_for,
                       std::vector<Waiting>* result);

  const World& world_;
  HostTable& table_;
  Requests& requests_;
  Turns& turns_;
  ThreadCommands& commands_;
};

}  // namespace mykv
