// The text by which ranks compare an operation: kind, operator, root or shards, scale, dtype, shape. Also how messages
// show signatures and the names of operations.
#pragma once

#include <string>
#include <vector>

#include "operations/request.h"

namespace mykv {

// '(3, 4)', '(3,)', '()'.
std::string shape_text(const std::vector<size_t>& shape);

// `root_label`: the operation's root in messages. `label`: more text that must be equal on all ranks, or empty.
// `shards`: the shards that replace the operation's root, or null.
std::string signature_of(const Operation& operation, const std::string& shape, int root_label, const std::string& label,
                         const std::vector<Shard>* shards = nullptr);

// The signature after its label; the signature alone if the label is empty.
std::string labelled(const std::string& label, const std::string& signature);

// Separates the options of a label. An error shows only the options that differ.
constexpr char kBetweenOptions = '\x1e';

// For messages. shown(): a signature with its label. shown_name(): the name of an operation as its caller knows it; a
// waiting call is shown by the label of its signature, such as 'barrier'.
std::string shown(const std::string& signature);
std::string shown_name(const std::string& name, const std::string& signature = {});
// The message about two ranks with different signatures. If their labels differ, it shows only the options that
// differ; otherwise, if their arrays differ, the label and the arrays. If texts are long, it shows the part where they
// differ.
std::string difference(const std::string& name, int rank, const std::string& signature, int other_rank,
                       const std::string& other_signature);

}  // namespace mykv
