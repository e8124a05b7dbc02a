#pragma once

#include <pybind11/pybind11.h>

namespace mykv {

void bind_region(pybind11::module_& m);

}  // namespace mykv
