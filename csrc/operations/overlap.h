// Checks whether arrays of a request overlap in memory.
#pragma once

#include <string>

#include "operations/request.h"

namespace mykv {

// Why a request's arrays cannot be read and written in place, in any order of their elements: an output overlaps an
// input or another output, and the shared memory holds different elements of the two arrays. Empty: no such overlap.
std::string overlap_in_part(const Request& request);

}  // namespace mykv
