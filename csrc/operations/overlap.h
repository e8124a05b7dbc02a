// Memory of a request that lies in other memory of it.
#pragma once

#include <string>

#include "operations/request.h"

namespace mykv {

// Why a request's arrays cannot be read and written where they are, in any order of their elements: an output overlaps
// an input, or another output, and the memory they have in common holds different elements of them. Empty: they can.
std::string overlap_in_part(const Request& request);

}  // namespace mykv
