// Which phase of an operation is shown at each moment. The parts of a large array are in different phases at the same
// time, but a row can show only one: first what the rank's own thread does, then what others do for it, last waiting.
#pragma once

#include <cstdint>
#include <vector>

#include "timeline/records.h"

namespace mykv {

enum class Phase : uint8_t { copy_in, copy_out, reduce, spread, network, wait };  // in the order in which they win

const char* phase_name(Phase phase);

struct PhasePiece {
  Phase phase;
  size_t part;  // its place in RequestRecord::parts
  int64_t begin;
  int64_t end;
};

// Disjoint, in the order of time, within the request's own times.
std::vector<PhasePiece> phases_of(const RequestRecord& request);

}  // namespace mykv
