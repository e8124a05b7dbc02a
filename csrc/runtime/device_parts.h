// Parts whose arrays are on GPUs and are staged in host memory: the differences from parts.h. A stream of the runtime
// copies the part into its slot; then the part arrives in the host's table. At the end a stream copies the result out.
// The thread polls the GPUs and never blocks on them.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "gpu/device.h"
#include "gpu/memory.h"
#include "runtime/parts.h"
#include "runtime/requests.h"
#include "table/host_table.h"
#include "world/world.h"

namespace mykv {

// Used by the runtime's thread only, apart from take_note().
class DeviceParts {
 public:
  DeviceParts(const World& world, HostTable& table, gpu::PinnedSlots& pinned, Requests& requests, Parts& parts)
      : world_(world), table_(table), pinned_(pinned), requests_(requests), parts_(parts) {}

  // Whether the memory of a request is not ready yet, since work in other streams has not ended. Such a request takes
  // no slot and blocks no stream, so that later requests can overtake it.
  static bool awaits_device(RequestState& posted);
  // Begins to copy a part into a slot.
  void begin(Part part);
  // Begins to copy the result of a part out, after all ranks have reduced it. A part with an error only ends.
  void copy_out_and_leave(const Part& part, const Failure& error);
  // Enters a part in the host's table when it has been copied in, and ends a part when it has been copied out.
  bool progress();
  bool copying() const { return !in_.empty() || !out_.empty(); }

  // Why this rank must leave: one of its GPUs did not get a result; empty: it need not leave.
  const std::string& retired() const { return retired_; }
  // At the end: waits some seconds for copies under way, since a caller may free its memory as soon as it learns
  // that its operation has failed. An operation whose result has reached its GPUs succeeds, as on the other ranks.
  void wait_for_copies();
  // The requests of parts that are being copied.
  void add_requests(std::vector<std::shared_ptr<RequestState>>* to) const;
  // Forgets all copies. The memory of copies under way is never released.
  void drop();
  // Whether a GPU may still use slots.
  bool unsafe() const { return unsafe_; }
  // A message for the log, returned once; empty: none. Thread-safe.
  std::string take_note();

 private:
  // A part that is being copied between its slot and GPUs.
  struct Copying {
    Part part;
    Operation operation;
    Failure error;                 // what failed; if it failed while copying in, it becomes this rank's refusal
    std::vector<uint64_t> inputs;  // on the way in: slots of inputs 1, 2, ..., which are reduced into the part's slot
    gpu::Copies copies;
    bool lost = false;  // a GPU may still read or write the slots
    int64_t begun = 0;  // when the copy began, for the timeline
  };

  void copy_in(Copying& copying);
  bool take_copied_in();
  void join_inputs(Copying& copying);
  void begin_copy_out(const Part& part);
  void copy_out(const Part& part);
  bool take_copied_out();
  void retire(const std::string& failure);
  std::string retired_text(const Part& part) const;
  void keep_memory(Copying& copying);
  void note_problem();

  const World& world_;
  HostTable& table_;
  gpu::PinnedSlots& pinned_;
  Requests& requests_;
  Parts& parts_;
  gpu::CopyStreams streams_in_, streams_out_;
  std::list<Copying> in_;   // parts being copied into slots, before they arrive in the host's table
  std::list<Copying> out_;  // parts whose results are being copied to GPUs
  uint64_t pass_ = 0;       // the number of calls of take_copied_in()
  bool unsafe_ = false;
  std::string retired_;
  bool told_ = false;  // note_ was set once
  std::mutex note_mutex_;
  std::string note_;
};

}  // namespace mykv
