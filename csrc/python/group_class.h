// Python's class Group. Each file of its bindings compiles for seconds, so there are two.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

#include "python/group.h"
#include "python/groups.h"

namespace mykv {

using GroupClass = pybind11::class_<Group, std::shared_ptr<Group>>;

// Binds a method of Group, and a function of the module that calls it on the world.
template <class Result, class... Arguments, class... Extra>
void bind_method(pybind11::module_& m, GroupClass& group, const char* name, Result (Group::*method)(Arguments...),
                 const Extra&... extra) {
  group.def(name, method, extra...);
  m.def(
      name,
      [method](Arguments... arguments) {
        // Another thread may shut the world down while this thread is in here without the GIL.
        const std::shared_ptr<Group> kept = require_world();
        return ((*kept).*method)(std::forward<Arguments>(arguments)...);
      },
      extra...);
}

// The same for a number or a list of the group's world.
template <class Get>
void bind_fact(pybind11::module_& m, GroupClass& group, const char* name, Get get) {
  group.def(name, [get](const Group& g) { return get(g.world()); });
  m.def(name, [get] { return get(require_world()->world()); });
}

void bind_group(pybind11::module_& m);
// The collective operations; bind_group() calls it.
void bind_calls(pybind11::module_& m, GroupClass& group);

}  // namespace mykv
