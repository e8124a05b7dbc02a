// All groups of this process: the world of init(), and how they all leave.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/runtime.h"

namespace mykv {

class Group;

// The world of init(), or null. After leave() it stays, stopped, for engine operations that run later.
std::shared_ptr<Group>& world_group();
// The same; throws Error before init().
std::shared_ptr<Group> require_world();

// Makes all groups of this process leave.
void leave_all(const std::string& reason);
// A process has died: ends all operations of all groups of this process. The groups take no more operations.
void lose_all(const Cause& reason);

// Registers a runtime, and the runtimes that it owns, until they are destroyed.
void register_runtime(const std::shared_ptr<Runtime>& runtime);
// Every runtime that may still run.
std::vector<std::weak_ptr<Runtime>> runtimes();

}  // namespace mykv
