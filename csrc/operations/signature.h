// The text by which ranks compare an operation: kind, operator, root or shards, scale, dtype, shape. And how such texts
// and the names of operations are shown in messages.
#pragma once

#include <string>
#include <vector>

#include "operations/request.h"

namespace mykv {

// '(3, 4)', '(3,)', '()'.
std::string shape_text(const std::vector<size_t>& shape);

// `root_label`: what messages call the operation's root. `label`: more text that must be equal on all ranks, or
// nothing. `shards`: in place of the operation's root, or null.
std::string signature_of(const Operation& operation, const std::string& shape, int root_label, const std::string& label,
                         const std::vector<Shard>* shards = nullptr);

// A signature that begins with a label, if there is one.
std::string labelled(const std::string& label, const std::string& signature);

// Between the options of a label, of which an error shows only those that differ.
constexpr char kBetweenOptions = '\x1e';

// For messages: a signature with its label; and the name under which an operation is matched, as its caller knows it.
std::string shown(const std::string& signature);
std::string shown_name(const std::string& name);
// The sentence on two ranks that bring other signatures. Where labels differ it shows these only, and otherwise of what
// the core does only the arrays, if these differ.
std::string difference(const std::string& name, int rank, const std::string& signature, int other_rank,
                       const std::string& other_signature);

}  // namespace mykv
