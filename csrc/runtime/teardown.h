// Ends a runtime: in order, when the other ranks need nothing more from it, or after a failure. Afterwards no rank
// waits for this rank, and every operation has ended with its result or an error.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "runtime/context.h"
#include "runtime/device_parts.h"
#include "runtime/part_events.h"
#include "runtime/parts.h"
#include "runtime/requests.h"
#include "runtime/sender.h"
#include "runtime/thread_commands.h"

namespace mykv {

// Used by the runtime's thread only.
class Teardown {
 public:
  Teardown(RuntimeContext& context, Requests& requests, Parts& parts, DeviceParts& device_parts, Sender& sender,
           PartEvents& events, ThreadCommands& commands)
      : context_(context),
        requests_(requests),
        parts_(parts),
        device_parts_(device_parts),
        sender_(sender),
        events_(events),
        commands_(commands) {}

  // Tells the other hosts that a rank of this host has left, unless they have been told.
  void tell_departure();
  // This rank has left and has no part in the host's table. `local_error`: the error of requests that have not begun.
  void end_in_order(const Failure& local_error);
  // The thread cannot continue. `gone`: the rank that is the cause. `local_error`: the error of this rank's operations;
  // `peer_error`: the error on the other ranks of this host, empty: the same.
  void break_down(const Departed& gone, const Failure& local_error, const Failure& peer_error);

 private:
  std::vector<uint32_t> fail_entries(const Departed& gone, const Failure& local_error, const Failure& peer_error);
  void tell_rank_0(const Departed& gone);
  void wait_until_unused(const std::vector<uint32_t>& mine);
  void end_all(const Failure& reason);

  RuntimeContext& context_;
  Requests& requests_;
  Parts& parts_;
  DeviceParts& device_parts_;
  Sender& sender_;
  PartEvents& events_;
  ThreadCommands& commands_;
  bool departure_told_ = false;
};

}  // namespace mykv
