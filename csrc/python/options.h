// The options of init().
#pragma once

#include <pybind11/pybind11.h>

#include "runtime/runtime.h"

namespace mykv {

// Throws ValueError if an option has an unknown name.
RuntimeOptions options_from(const pybind11::dict& given);

}  // namespace mykv
