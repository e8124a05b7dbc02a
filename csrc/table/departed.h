// The Error that a rank has left.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "base/error.h"

namespace mykv {

// `rank`: the label of the rank. The text names the rank and the reason. If a process has died, that is the cause, not
// that a rank leaves because of it.
struct Departed : Error {
  Departed(int gone, Cause why)
      : Error("rank " + std::to_string(gone) + " has left: " + why.text,
              why.code == ErrorCode::dead ? ErrorCode::dead : ErrorCode::departed,
              why.code == ErrorCode::dead ? why.ranks : std::vector<int>{gone}),
        rank(gone),
        reason(std::move(why)) {}
  int rank;
  Cause reason;
};

}  // namespace mykv
