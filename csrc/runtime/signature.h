// The text by which ranks compare an operation: kind, operator, root or shards, scale, dtype, shape.
#pragma once

#include <string>
#include <vector>

#include "runtime/request.h"
#include "runtime/world.h"

namespace mykv {

// '(3, 4)', '(3,)', '()'.
std::string shape_text(const std::vector<size_t>& shape);

// `label`: more text that must be equal on all ranks, or nothing. Roots are called as the world's messages call them.
// `shards`: in place of the operation's root, or null.
std::string signature_of(const Operation& operation, const std::string& shape, const World& world,
                         const std::string& label, const std::vector<Shard>* shards = nullptr);

}  // namespace mykv
