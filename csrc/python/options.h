// The options of init().
#pragma once

#include <pybind11/pybind11.h>

#include "runtime/runtime.h"

namespace mykv {

// Throws ValueError where one of them has a name that the core does not know.
RuntimeOptions options_from(const pybind11::dict& given);

}  // namespace mykv
