// The Error that a rank has left.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "base/error.h"

namespace mykv {

// What messages say when a rank leaves. A reason that begins with "ended with " says how its script has ended.
inline std::string departure_text(int rank, const std::string& reason) {
  const bool is_end = reason.rfind("ended with ", 0) == 0;
  return "rank " + std::to_string(rank) + (is_end ? " " : " has left: ") + reason;
}

// `rank`: the label of the rank. The text names the rank and the reason. If a process has died, that is the cause, not
// that a rank leaves because of it.
struct Departed : Error {
  Departed(int gone, Cause why)
      : Error(departure_text(gone, why.text), why.code == ErrorCode::dead ? ErrorCode::dead : ErrorCode::departed,
              why.code == ErrorCode::dead ? why.ranks : std::vector<int>{gone}),
        rank(gone),
        reason(std::move(why)) {}
  int rank;
  Cause reason;
};

}  // namespace mykv
