#include "python/groups.h"

#include <algorithm>
#include <mutex>

#include "base/error.h"
#include "base/forks.h"
#include "world/communicator.h"

namespace mykv {

namespace {

// Every runtime that may still run.
struct Runtimes {
  std::mutex mutex;
  std::vector<std::weak_ptr<Runtime>> all;
};
Runtimes& all_runtimes() { return usable_in_forks<Runtimes>(); }

}  // namespace

void register_runtime(const std::shared_ptr<Runtime>& runtime) {
  std::lock_guard<std::mutex> lock(all_runtimes().mutex);
  auto& all = all_runtimes().all;
  all.erase(std::remove_if(all.begin(), all.end(), [](const auto& one) { return one.expired(); }), all.end());
  all.push_back(runtime);
}

std::vector<std::weak_ptr<Runtime>> runtimes() {
  std::lock_guard<std::mutex> lock(all_runtimes().mutex);
  return all_runtimes().all;
}

std::shared_ptr<Group>& world_group() {
  static std::shared_ptr<Group>& group = *new std::shared_ptr<Group>;
  return group;
}

std::shared_ptr<Group> require_world() {
  if (!world_group()) throw Error("mykv is not initialized: call kvstore_plugin.init() first");
  return world_group();
}

void leave_all(const std::string& reason) {
  for (const std::weak_ptr<Runtime>& one : runtimes()) {
    if (const std::shared_ptr<Runtime> runtime = one.lock()) runtime->leave(reason);
  }
}

void lose_all(const Cause& reason) {
  RevokeOnDeath::lose();
  std::lock_guard<std::mutex> lock(all_runtimes().mutex);
  for (const std::weak_ptr<Runtime>& one : all_runtimes().all) {
    if (const std::shared_ptr<Runtime> runtime = one.lock()) runtime->lose(reason);
  }
}

}  // namespace mykv
