// Python's functions about the MXNet of this process.
#pragma once

#include <pybind11/pybind11.h>

namespace mykv {

void bind_mxnet(pybind11::module_& m);

}  // namespace mykv
