// A rank that takes no further part, as an Error.
#pragma once

#include <string>
#include <utility>

#include "base/error.h"

namespace mykv {

// `rank`: what messages call it. The text names it, and why it has gone.
struct Departed : Error {
  Departed(int gone, std::string why)
      : Error("rank " + std::to_string(gone) + " has left: " + why), rank(gone), reason(std::move(why)) {}
  int rank;
  std::string reason;
};

}  // namespace mykv
