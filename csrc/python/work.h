// A pending request on numpy buffers, as Python sees it.
#pragma once

#include <pybind11/numpy.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/forks.h"

namespace mykv {

class Runtime;

class Work {
 public:
  // `kept`: the arrays that the core reads and writes, kept alive.
  Work(std::vector<pybind11::array> kept, std::weak_ptr<Runtime> runtime)
      : kept_(std::move(kept)), runtime_(std::move(runtime)) {}
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;
  // Waits until the request has ended, since the core uses the buffers until then.
  ~Work();

  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::atomic<bool> done = false;  // changed only under the mutex
    std::optional<Failure> error;

    void finish(const Failure* failure);
  };
  std::shared_ptr<State> state() const { return state_; }

  // True when the request is done, false after `timeout` seconds (negative: no limit); throws Error if it failed.
  bool wait(double timeout);
  bool done() const;

 private:
  const uint32_t forks_ = fork_number();
  std::vector<pybind11::array> kept_;
  const std::weak_ptr<Runtime> runtime_;
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

void bind_work(pybind11::module_& m);

}  // namespace mykv
