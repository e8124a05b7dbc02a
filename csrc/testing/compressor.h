// The compressors on numpy arrays, without ranks: for checks of parameters, tests and measurements.
#pragma once

#include <pybind11/pybind11.h>

namespace mykv {

void bind_compressor(pybind11::module_& m);

}  // namespace mykv
