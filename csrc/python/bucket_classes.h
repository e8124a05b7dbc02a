// Python's classes of buckets: the memory, and the operations on it that are made once and pushed in each step.
#pragma once

#include <pybind11/pybind11.h>

namespace mykv {

void bind_buffer(pybind11::module_& m);
void bind_prepared(pybind11::module_& m);
void bind_fence(pybind11::module_& m);

}  // namespace mykv
