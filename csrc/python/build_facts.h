// What was built and what of it is in use, as Python sees it: MPI, compiler, kernels, transports.
#pragma once

#include <pybind11/pybind11.h>

namespace mykv {

void bind_build_facts(pybind11::module_& m);

}  // namespace mykv
