// Python's class Group. The compiler takes half a second for a method, since pybind11 makes two functions of it. So the
// bindings are several files, and each compiles in less than ten seconds.
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

// The arguments of operations, which most methods have, with their defaults.
struct OperationArguments {
  pybind11::arg name{"name"};
  pybind11::arg_v op = pybind11::arg("op") = "sum";
  pybind11::arg_v scale = pybind11::arg("scale") = 1.0;
  pybind11::arg_v priority = pybind11::arg("priority") = 0;
  pybind11::arg_v label = pybind11::arg("label") = "";
  pybind11::arg_v turn_of = pybind11::arg("turn_of") = "";
  pybind11::arg_v wire = pybind11::arg("wire") = "";  // between hosts: a type, or a compressor; '': unchanged
};

void bind_group(pybind11::module_& m);
// What bind_group() calls for a part of the methods each:
void bind_submits(pybind11::module_& m, GroupClass& group);  // operations on arrays of numpy
void bind_memory(pybind11::module_& m, GroupClass& group);   // memory of the host and of GPUs, and operations on it
void bind_pushes(pybind11::module_& m, GroupClass& group);   // operations of MXNet's engine on whole arrays
void bind_pieces(pybind11::module_& m, GroupClass& group);   // such operations that each rank gets a piece of, or gives
void bind_waits(pybind11::module_& m, GroupClass& group);    // refusing, who waits for whom, giving up

}  // namespace mykv
