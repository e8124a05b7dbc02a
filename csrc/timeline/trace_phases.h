// The phase of an operation that is shown at each moment. The parts of a large array are in different phases at the
// same time, but a row can show only one: first the work of the rank's own thread, then work of others, last waiting.
#pragma once

#include <cstdint>
#include <vector>

#include "timeline/records.h"

namespace mykv {

enum class Phase : uint8_t { copy_in, copy_out, reduce, spread, network, wait };  // in the order of precedence

const char* phase_name(Phase phase);

struct PhasePiece {
  Phase phase;
  size_t part;  // index in RequestRecord::parts
  int64_t begin;
  int64_t end;
};

// The shown phases: disjoint, in the order of time, within the request's times.
std::vector<PhasePiece> phases_of(const RequestRecord& request);

}  // namespace mykv
