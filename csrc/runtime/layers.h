// Sums of arrays on GPUs of several hosts in layers (MYKV_GPU_HOSTS=arena). First all ranks meet in the world with
// their signatures only, so that differences, refusals and stalls are reported as for any operation. Then NCCL reduces
// within each host, a shard to each of its ranks; each shard is reduced with those of the other hosts through host
// memory and MPI; and NCCL broadcasts the results to all GPUs of the host. If the memory of some rank does not fit this
// scheme (it lies on several GPUs, for example), all ranks learn it at the meeting and use host memory.
//
// The ranks of a host have a runtime of their own, as process sets have, and so have the ranks with the same local rank
// on all hosts. No GPU is held while a rank waits for another host.
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

  // A request whose road is Road::layered. It ends alike on all ranks; a rank on which it ends otherwise leaves the
  // world.
  void post(Runtime& world, Request request);
  // Waits until all posted requests have ended, at most for `patience`.
  void wait(std::chrono::steady_clock::duration patience);
  std::vector<std::shared_ptr<Runtime>> runtimes() const { return {host_, between_}; }

 private:
  struct Going;  // a request on its way

  bool fits(const Request& request) const;
  void begin(const std::shared_ptr<Going>& going);
  void next(const std::shared_ptr<Going>& going);
  void end(const std::shared_ptr<Going>& going, const Cause* error);
  Request within(const Going& going, bool back) const;
  Request between(const Going& going) const;
  Shard shard_of(size_t count, int rank) const;

  int rank_;  // local rank
  int size_;  // ranks of the host
  std::shared_ptr<Runtime> host_;
  std::shared_ptr<Runtime> between_;
  std::mutex mutex_;
  std::condition_variable ended_;
  size_t going_ = 0;
};

}  // namespace mykv
