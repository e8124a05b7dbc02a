// The timeline as Python sees it.
#pragma once

#include <pybind11/pybind11.h>

namespace mykv {

void bind_timeline(pybind11::module_& m);

}  // namespace mykv
