// The Error that a rank has left.
#pragma once

#include <string>
#include <utility>

#include "base/error.h"

namespace mykv {

// `rank`: the label of the rank. The text names the rank and the reason.
struct Departed : Error {
  Departed(int gone, std::string why)
      : Error("rank " + std::to_string(gone) + " has left: " + why), rank(gone), reason(std::move(why)) {}
  int rank;
  std::string reason;
};

}  // namespace mykv
