// How this process ends when it fails: at once and by a signal, so that its launcher and the other workers notice.
#pragma once

#include <pybind11/pybind11.h>

namespace mykv {

void bind_failed_end(pybind11::module_& m);

}  // namespace mykv
