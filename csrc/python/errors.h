// The errors of the core as exceptions of Python, with their codes and ranks as attributes.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "base/error.h"

namespace mykv {

void bind_errors(pybind11::module_& m);
// What is raised for operations that fail inside a push: MXNetError. None: RuntimeError.
void set_failure_type(const pybind11::object& type);
// Throws ValueError if there is no such code.
ErrorCode error_code_of(const std::string& name);

}  // namespace mykv
