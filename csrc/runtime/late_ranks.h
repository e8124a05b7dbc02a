// Which ranks this rank's operations wait for. The host's table knows this about its own ranks. The other hosts are
// asked only on demand, so that an operation that does not wait costs no more than a look at a coarse clock.
#pragma once

#include <string>
#include <vector>

#include "runtime/context.h"
#include "runtime/requests.h"
#include "runtime/turns.h"
#include "runtime/waiting.h"
#include "runtime/wishes.h"

namespace mykv {

// Thread-safe; not for the runtime's thread, which asks the other hosts.
class LateRanks {
 public:
  LateRanks(RuntimeContext& context, Requests& requests, Turns& turns, Wishes& wishes)
      : context_(context), requests_(requests), turns_(turns), wishes_(wishes) {}

  // How long the oldest operation has waited, in seconds; 0: no operation waits.
  double longest_wait();
  // Operations that have waited for `least_seconds`, the oldest first; only those under `name`, unless it is empty. On
  // several hosts this asks the other hosts, which takes up to some seconds if a host does not answer.
  std::vector<Waiting> waiting(double least_seconds, const std::string& name);
  // For each name, the ranks that have arrived at this rank's next operation under that name, which this rank has not
  // asked for yet. With `turn_of`: at the operation with the last turn under `turn_of`. Asks other hosts as waiting().
  std::vector<std::vector<int>> waiting_for_this(const std::vector<std::string>& names, const std::string& turn_of);

 private:
  std::vector<Waiting> waiting_here(double least_seconds, const std::string& name);
  void add_other_hosts(const std::vector<Key>& asked, const std::vector<size_t>& asked_for,
                       std::vector<Waiting>* result);

  RuntimeContext& context_;
  Requests& requests_;
  Turns& turns_;
  Wishes& wishes_;
};

}  // namespace mykv
