#include "python/work.h"

#include <pybind11/pybind11.h>

#include <chrono>
#include <cstdint>

#include "base/clock.h"
#include "base/error.h"
#include "python/without_gil.h"
#include "runtime/runtime.h"

namespace py = pybind11;

namespace mykv {

namespace {
constexpr double kLongestS = 1e9;  // longer limits mean no limit
}  // namespace

Work::~Work() {
  if (fork_number() != forks_) return;  // in a fork no thread finishes the request
  WithoutGil release;
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->changed.wait(lock, [this] { return state_->done.load(); });
}

void Work::State::finish(const Failure* failure) {
  std::lock_guard<std::mutex> lock(mutex);
  if (failure != nullptr) error = *failure;
  done = true;
  changed.notify_all();
}

bool Work::wait(double timeout) {
  if (fork_number() != forks_) throw Error("this process is a fork of the process that waits for this operation");
  WithoutGil release;
  const auto over = [this] { return state_->done.load(); };
  const int64_t begun = now_ns();
  const bool endless = !(timeout >= 0 && timeout <= kLongestS);
  const int64_t until = endless ? INT64_MAX : begun + static_cast<int64_t>(timeout * 1e9);
  if (const std::shared_ptr<Runtime> runtime = over() ? nullptr : runtime_.lock()) runtime->stand_in(over, until);
  std::unique_lock<std::mutex> lock(state_->mutex);
  if (endless) {
    state_->changed.wait(lock, over);
  } else if (!state_->changed.wait_for(lock, std::chrono::nanoseconds(until - now_ns()), over)) {
    return false;
  }
  if (state_->error) throw Error(*state_->error);
  return true;
}

bool Work::done() const { return state_->done; }

void bind_work(py::module_& m) {
  py::class_<Work>(m, "Work", "A request on numpy buffers under way.")
      .def("wait", &Work::wait, py::arg("timeout") = -1.0,
           "True when done, False when `timeout` seconds are over; raises Error.")
      .def("done", &Work::done);
}

}  // namespace mykv
