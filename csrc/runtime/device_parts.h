// Parts whose arrays lie on GPUs and go through slots in host memory: what a runtime has of them.
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
  std::string error;             // what failed; on the way in the other ranks hear it as a refusal
  std::vector<uint64_t> inputs;  // on the way in: slots of several inputs, which become one share in the first
  gpu::Copies copies;
  bool lost = false;  // nobody will know whether a GPU still reads or writes the slots
  int64_t begun = 0;  // for the timeline
};

// Of the runtime's thread alone.
struct Staged {
  Staged(const Segment& segment, Region& region) : slots(segment, region) {}
  bool copying() const { return !in.empty() || !out.empty(); }

  gpu::PinnedSlots slots;
  gpu::CopyStreams streams_in, streams_out;
  std::list<Copying> in;   // on their way to the host's table
  std::list<Copying> out;  // on their way back
  bool gated = false;      // some request waits for a stream of its caller's
  bool unsafe = false;     // a GPU may still use the slots when the runtime ends
};

}  // namespace mykv
