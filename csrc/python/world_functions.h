// The functions that start and end the groups of this process, as Python sees them.
#pragma once

#include <pybind11/pybind11.h>

namespace mykv {

// After bind_group(), since signatures name Group.
void bind_world(pybind11::module_& m);

}  // namespace mykv
