#include "runtime/signature.h"

#include <cstdio>

namespace mykv {

std::string shape_text(const std::vector<size_t>& shape) {
  std::string text = "(";
  for (size_t d = 0; d < shape.size(); ++d) text += (d > 0 ? ", " : "") + std::to_string(shape[d]);
  return text + (shape.size() == 1 ? ",)" : ")");
}

std::string signature_of(const Operation& operation, const std::string& shape, const World& world,
                         const std::string& label) {
  std::string text;
  if (operation.kind == Kind::broadcast) {
    text = "broadcast from rank " + std::to_string(world.label(operation.root));
  } else {
    text = std::string("allreduce ") + reduce_op_name(operation.reduce_op);
    if (operation.scale != 1.0) {
      char number[32];
      std::snprintf(number, sizeof number, "%.17g", operation.scale);
      text += std::string(" times ") + number;
    }
  }
  text += std::string(" of ") + dtype_name(operation.dtype) + " " + shape;
  if (operation.wire) text += std::string(", as ") + dtype_name(*operation.wire) + " between hosts";
  return label.empty() ? text : label + " (" + text + ")";
}

}  // namespace mykv
