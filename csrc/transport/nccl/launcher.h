// What the groups of a process share of NCCL: whose turn it is to launch (table/launch_order.h), one stream for each
// GPU that all of it goes through, and memory there for what cannot go straight from array to array.
#pragma once

#include <unistd.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "gpu/device.h"
#include "table/host_table.h"

namespace mykv {

class Launcher {
 public:
  // That of a new world, from now on; `ranks`: of its host, by local rank.
  static std::shared_ptr<Launcher> begin(LaunchOrder& order, std::vector<int> ranks);
  // That of the last world, or null.
  static std::shared_ptr<Launcher> current();
  ~Launcher();

  LaunchOrder& order() const { return order_; }
  // The local ranks of the world that have these ranks there; empty where one of them is on another host.
  std::vector<int> local_ranks(const std::vector<int>& ranks) const;

  // Whether all that comes before this number is launched, or never will be. If not, `bell` rings when it is.
  bool is_turn(uint64_t number, Bell& bell);
  // It is launched, or never will be. May be told twice.
  void release(uint64_t number);

  // Of whoever's turn it is.
  gpu::Stream& stream(int device);
  char* scratch(int device, size_t bytes);
  // Takes that much memory now; throws Error where the GPU has none. What is taken stays until the end.
  void reserve(int device, size_t bytes);
  // A GPU may never end what it does: nothing is given back.
  void keep() { kept_ = true; }

 private:
  struct Device {
    std::unique_ptr<gpu::Stream> stream;
    std::vector<void*> blocks;  // the last one counts; others may be in use
    size_t bytes = 0;           // of that
  };

  Launcher(LaunchOrder& order, std::vector<int> ranks) : order_(order), ranks_(std::move(ranks)) {}
  Device& device(int number);

  LaunchOrder& order_;
  const std::vector<int> ranks_;
  const pid_t process_ = getpid();
  std::atomic<bool> kept_{false};
  std::mutex mutex_;  // guards what follows
  uint64_t next_ = 1;
  std::set<uint64_t> released_;  // beyond next_
  std::map<uint64_t, Bell*> waiting_;
  std::map<int, Device> devices_;
};

}  // namespace mykv
