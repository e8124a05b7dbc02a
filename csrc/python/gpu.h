// GPUs, as Python sees them.
#pragma once

#include <pybind11/pybind11.h>

namespace mykv {

void bind_gpu(pybind11::module_& m);

}  // namespace mykv
