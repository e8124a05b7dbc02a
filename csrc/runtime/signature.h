// The text by which ranks compare an operation: kind, operator or root, scale, dtype, shape.
#pragma once

#include <string>
#include <vector>

#include "runtime/operation.h"
#include "runtime/world.h"

namespace mykv {

// '(3, 4)', '(3,)', '()'.
std::string shape_text(const std::vector<size_t>& shape);

// `label`: more text that must be equal on all ranks, or nothing. Roots are called as the world's messages call them.
std::string signature_of(const Operation& operation, const std::string& shape, const World& world,
                         const std::string& label);

}  // namespace mykv
