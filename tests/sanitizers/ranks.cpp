#include "ranks.h"

#include "operations/signature.h"

namespace mykv::testing {

namespace {
constexpr size_t kRegionBytes = size_t{64} << 20;
constexpr auto kPatience = std::chrono::seconds(60);  // a machine under load, under a sanitizer
}  // namespace

std::function<void(const Failure*)> Outcome::done() {
  return [state = state_](const Failure* error) {
    std::lock_guard<std::mutex> lock(state->mutex);
    ++state->times;
    if (error != nullptr) state->error = *error;
    state->changed.notify_all();
  };
}

std::optional<std::string> Outcome::wait(const std::string& name) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  // Not wait_for(): the steady clock's wait is a function that older sanitizers do not know.
  const bool ended =
      state_->changed.wait_until(lock, std::chrono::system_clock::now() + kPatience, [&] { return state_->times > 0; });
  require(ended, name + " did not end");
  require(state_->times == 1, name + " ended more than once");
  if (!state_->error) return std::nullopt;
  return state_->error->text;
}

Ranks::Ranks(int size, const RuntimeOptions& options) : host_(size, kRegionBytes, options.world.table_capacity) {
  for (int rank = 0; rank < size; ++rank) {
    runtimes_.push_back(std::make_shared<Runtime>(std::make_unique<World>(host_, rank, options.world), options));
  }
}

Ranks::~Ranks() {
  for (const auto& runtime : runtimes_) runtime->leave("the test is over");
}

Request request_of(Runtime& runtime, const std::string& name, Kind kind, size_t count, int root) {
  Request request;
  request.name = name;
  request.turn = runtime.take_turn(name);
  request.ticket = runtime.take_ticket();
  request.operation.kind = kind;
  request.operation.root = root;
  request.operation.set_arrays(DType::int32, count);
  request.signature = signature_of(request.operation, shape_text({count}), runtime.world().label(root), "");
  return request;
}

Sum::Sum(Runtime& runtime, const std::string& name, size_t count) : values(count, 1 << runtime.world().rank()) {
  Request request = request_of(runtime, name, Kind::allreduce, count);
  request.inputs = {values.data()};
  request.outputs = {values.data()};
  request.done = outcome.done();
  runtime.post(std::move(request));
}

}  // namespace mykv::testing
