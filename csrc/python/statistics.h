// The statistics as Python sees them.
#pragma once

#include <pybind11/pybind11.h>

#include "python/group.h"

namespace mykv {

// Counts of a group's operations on this rank, and how late its ranks were, as far as this rank knows.
pybind11::dict statistics(const Group& group);
void bind_statistics(pybind11::module_& m, pybind11::class_<Group, std::shared_ptr<Group>>& group);

}  // namespace mykv
