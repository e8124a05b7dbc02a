// Sums of arrays on GPUs of several hosts in layers (MYKV_GPU_HOSTS=arena). First all ranks meet in the world, with
// nothing but their signatures, so that what differs, is refused or waits is told as of any operation. Then NCCL adds
// up within each host, a shard to each of its ranks; each shard meets those of the other hosts through host memory and
// MPI; and NCCL gives the results to all GPUs of the host. Where the memory of some rank does not fit that, on several
// GPUs for example, they learn it when they meet, and all go through host memory.
//
// The ranks of a host, and those with the same place on all hosts, have runtimes of their own for that, as process sets
// have. No GPU is held while another host is waited for.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "operations/request.h"
#include "world/world.h"

namespace mykv {

class Runtime;
struct RuntimeOptions;

class Layers {
 public:
  // Collective. For hosts with equally many ranks; the options are those of the world's runtime.
  Layers(const World& world, const RuntimeOptions& options);

  // A request whose road is Road::layered. It ends on all ranks alike; a rank of which it does not leaves the world.
  void post(Runtime& world, Request request);
  // Until all that have met are through, but not longer.
  void wait(std::chrono::steady_clock::duration patience);
  std::vector<std::shared_ptr<Runtime>> runtimes() const { return {host_, between_}; }

 private:
  struct Going;  // a request on its way

  bool fits(const Request& request) const;
  void begin(const std::shared_ptr<Going>& going);
  void next(const std::shared_ptr<Going>& going);
  void end(const std::shared_ptr<Going>& going, const std::string* error);
  Request within(const Going& going, bool back) const;
  Request between(const Going& going) const;
  Shard shard_of(size_t count, int rank) const;

  int rank_;  // on the host, of so many
  int size_;
  std::shared_ptr<Runtime> host_;
  std::shared_ptr<Runtime> between_;
  std::mutex mutex_;
  std::condition_variable ended_;
  size_t going_ = 0;
};

}  // namespace mykv
