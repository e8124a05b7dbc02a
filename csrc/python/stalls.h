// The stall watch of all groups, for a thread of Python.
#pragma once

#include <pybind11/pybind11.h>

namespace mykv {

void bind_stall_watch(pybind11::module_& m);

}  // namespace mykv
