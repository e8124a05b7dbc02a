// How this process ends when it fails: by a signal, and at once, so that its launcher and the other workers hear of it.
#pragma once

#include <pybind11/pybind11.h>

namespace mykv {

void bind_failed_end(pybind11::module_& m);

}  // namespace mykv
