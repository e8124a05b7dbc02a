// The functions of mxnet/gradient_norm.h as Python sees them.
#pragma once

#include <pybind11/pybind11.h>

namespace mykv {

void bind_gradient_norm(pybind11::module_& m);

}  // namespace mykv
