// State of a runtime for parts whose arrays lie on GPUs and go through slots in host memory.
#pragma once

#include <cstdint>
#include <list>
#include <string>
#include <vector>

#include "gpu/copies.h"
#include "gpu/pinned_slots.h"
#include "runtime/request_state.h"

namespace mykv {

// A part that is being copied between its slot and GPUs.
struct Copying {
  Part part;
  Operation operation;
  Cause error;                   // what failed; on the way in it becomes this rank's refusal
  std::vector<uint64_t> inputs;  // on the way in: slots of inputs 1, 2, ..., which are reduced into the part's slot
  gpu::Copies copies;
  bool lost = false;  // it cannot be known whether a GPU still reads or writes the slots
  int64_t begun = 0;  // for the timeline
};

// Used by the runtime's thread only.
struct Staged {
  Staged(const Segment& segment, Region& region) : slots(segment, region) {}
  bool copying() const { return !in.empty() || !out.empty(); }

  gpu::PinnedSlots slots;
  gpu::CopyStreams streams_in, streams_out;
  std::list<Copying> in;   // parts being copied into slots, before they arrive in the host's table
  std::list<Copying> out;  // parts whose results are being copied to GPUs
  bool gated = false;      // some request waits for a stream of its caller
  bool unsafe = false;     // a GPU may still use the slots when the runtime ends
};

}  // namespace mykv
