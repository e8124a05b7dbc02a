// Ranks that are threads of this process and share one mapping, each with a runtime of its own, as processes have it:
// for tools that see one process only. No MPI is started.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "runtime/runtime.h"
#include "world/world.h"

namespace mykv::testing {

using Random = std::mt19937;

inline size_t below(Random& random, size_t bound) { return random() % bound; }

struct Failed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void require(bool holds, const std::string& what) {
  if (!holds) throw Failed(what);
}

// What became of a request.
class Outcome {
 public:
  std::function<void(const Failure*)> done();
  // The error, or nothing; throws Failed where there is neither that nor a result within a minute.
  std::optional<std::string> wait(const std::string& name);

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    int times = 0;
    std::optional<Failure> error;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

class Ranks {
 public:
  explicit Ranks(int size, const RuntimeOptions& options = {});
  ~Ranks();

  int size() const { return host_.size(); }
  Runtime& operator[](int rank) { return *runtimes_[static_cast<size_t>(rank)]; }
  // Calls run(rank) in a thread for each rank, and throws what one of them threw.
  template <class Run>
  void each(Run&& run) {
    parallel(size(), run);
  }

  template <class Run>
  static void parallel(int threads, Run&& run) {
    std::vector<std::thread> running;
    std::vector<std::exception_ptr> failures(static_cast<size_t>(threads));
    for (int t = 0; t < threads; ++t) {
      running.emplace_back([&, t] {
        try {
          run(t);
        } catch (...) {
          failures[static_cast<size_t>(t)] = std::current_exception();
        }
      });
    }
    for (std::thread& thread : running) thread.join();
    for (const std::exception_ptr& failure : failures) {
      if (failure) std::rethrow_exception(failure);
    }
  }

 private:
  ThreadHost host_;
  std::vector<std::shared_ptr<Runtime>> runtimes_;
};

// A request of int32 elements for the next turn under `name`; arrays are for the caller to add.
Request request_of(Runtime& runtime, const std::string& name, Kind kind, size_t count, int root = 0);

// Sums of one array per rank, copied in and out; the shortest way to an operation.
struct Sum {
  Sum(Runtime& runtime, const std::string& name, size_t count);
  std::vector<int32_t> values;
  Outcome outcome;
};

}  // namespace mykv::testing
