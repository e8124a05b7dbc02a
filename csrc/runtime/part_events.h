// Reacts to the table's log of events of this rank's parts: all ranks of the host have arrived, all ranks are ready, or
// the part is done.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/context.h"
#include "runtime/device_parts.h"
#include "runtime/parts.h"
#include "runtime/requests.h"
#include "runtime/send_queue.h"

namespace mykv {

// Used by the runtime's thread only.
class PartEvents {
 public:
  PartEvents(RuntimeContext& context, Requests& requests, SendQueue& queue, Parts& parts, DeviceParts& device_parts)
      : context_(context), requests_(requests), queue_(queue), parts_(parts), device_parts_(device_parts) {}

  // Handles all new events. Returns whether there were any. Throws Error if this rank cannot continue.
  bool take_events();
  // Ends one part that is done. Returns whether there was one. A failed part waits until no rank writes into its
  // arrays, but at most a second, since a rank may have been stopped while it was writing.
  bool take_finished();
  bool has_finished() const { return !finished_.empty(); }

  // Functions for the end of the runtime.

  // Finds entries that ended with a result before this rank noticed: other ranks may have taken the result.
  void find_finished(const std::vector<uint32_t>& entries);
  // Ends the parts that have a result.
  void complete_results();
  // The requests of parts that are done and have not ended.
  void add_requests(std::vector<std::shared_ptr<RequestState>>* to) const;
  void drop() { finished_.clear(); }

 private:
  struct Finished {
    Part part;
    Failure error;
    int64_t since;  // when the part was done; now_ns()
  };
  void handle(const TableEvent& event);
  void announce(const TableEvent& event);
  void start(const TableEvent& event);
  void finish(const TableEvent& event);
  void rescan();
  bool others_need(const Part& part);
  [[noreturn]] void throw_failure_of(uint32_t entry);
  void note_agreed(const Part& part);
  void copy_out_and_leave(const Finished& one);

  RuntimeContext& context_;
  Requests& requests_;
  SendQueue& queue_;
  Parts& parts_;
  DeviceParts& device_parts_;
  std::deque<Finished> finished_;  // parts that are done and are no longer in Requests
};

}  // namespace mykv
