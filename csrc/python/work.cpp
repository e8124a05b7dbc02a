#include "python/work.h"

#include <pybind11/pybind11.h>

#include <chrono>

#include "base/error.h"

namespace py = pybind11;

namespace mykv {

Work::~Work() {
  if (fork_number() != forks_) return;  // in a fork no thread finishes it
  py::gil_scoped_release release;
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->changed.wait(lock, [this] { return state_->done; });
}

void Work::State::finish(const Cause* failure) {
  std::lock_guard<std::mutex> lock(mutex);
  if (failure != nullptr) error = *failure;
  done = true;
  changed.notify_all();
}

bool Work::wait(double timeout) {
  py::gil_scoped_release release;
  std::unique_lock<std::mutex> lock(state_->mutex);
  const auto over = [this] { return state_->done; };
  if (timeout < 0) {
    state_->changed.wait(lock, over);
  } else if (!state_->changed.wait_for(lock, std::chrono::duration<double>(timeout), over)) {
    return false;
  }
  if (state_->error) throw Error(*state_->error);
  return true;
}

bool Work::done() const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->done;
}

}  // namespace mykv
