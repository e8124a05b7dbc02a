#include "runtime/signature.h"

#include <cstdio>

#include "compress/compressor.h"

namespace mykv {

std::string shape_text(const std::vector<size_t>& shape) {
  std::string text = "(";
  for (size_t d = 0; d < shape.size(); ++d) text += (d > 0 ? ", " : "") + std::to_string(shape[d]);
  return text + (shape.size() == 1 ? ",)" : ")");
}

namespace {

std::string shards_text(const std::vector<Shard>& shards) {
  char digest[24];
  uint64_t hash = 0;
  for (const Shard& shard : shards) {
    const uint64_t numbers[3] = {shard.begin, shard.count, static_cast<uint64_t>(shard.root)};
    hash = hash_bytes(numbers, sizeof numbers, hash);
  }
  std::snprintf(digest, sizeof digest, "%08x", static_cast<unsigned>(hash));
  return "the owners of " + std::to_string(shards.size()) + " shards (division " + digest + ")";
}

}  // namespace

std::string signature_of(const Operation& operation, const std::string& shape, const World& world,
                         const std::string& label, const std::vector<Shard>* shards) {
  const std::string root =
      shards != nullptr ? shards_text(*shards) : "rank " + std::to_string(world.label(operation.root));
  std::string text;
  if (operation.kind == Kind::broadcast) {
    text = "broadcast from " + root;
  } else {
    text = std::string(operation.kind == Kind::reduce ? "reduce to " + root + ", " : "allreduce ") +
           reduce_op_name(operation.reduce_op);
    if (operation.scale != 1.0) {
      char number[32];
      std::snprintf(number, sizeof number, "%.17g", operation.scale);
      text += std::string(" times ") + number;
    }
  }
  text += std::string(" of ") + dtype_name(operation.dtype) + " " + shape;
  if (operation.wire) text += std::string(", as ") + dtype_name(*operation.wire) + " between hosts";
  if (operation.compressor != nullptr) text += ", compressed by '" + operation.compressor->text() + "' between hosts";
  return label.empty() ? text : label + " (" + text + ")";
}

}  // namespace mykv
