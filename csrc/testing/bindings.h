// The bindings of the test module.
#pragma once

#include <pybind11/pybind11.h>

namespace mykv {

// The compressors on numpy arrays, without ranks: for checks of parameters, tests and measurements.
void bind_compressor(pybind11::module_& m);

// Access of tests to the loaded core: the module kvstore_plugin._core of this process, not this module's copy of its
// code. Throws ImportError if the core was built from other sources, since its objects may have another layout.
void bind_live(pybind11::module_& m);

void bind_region(pybind11::module_& m);

void bind_door(pybind11::module_& m);

}  // namespace mykv
