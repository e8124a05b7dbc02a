// What tests do to the core that is loaded: the module mykv_core of this process, not this module's copy of its code.
#pragma once

#include <pybind11/pybind11.h>

namespace mykv {

// Imports mykv_core; throws ImportError if it was built from other sources, since its objects may look different then.
void bind_live(pybind11::module_& m);

}  // namespace mykv
