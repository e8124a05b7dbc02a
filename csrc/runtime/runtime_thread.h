// The runtime's own thread: the only thread that waits for other ranks. It moves all requests on, sleeps when there is
// nothing to do, and ends the runtime.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/context.h"
#include "runtime/device_parts.h"
#include "runtime/ending.h"
#include "runtime/part_events.h"
#include "runtime/requests.h"
#include "runtime/sender.h"
#include "runtime/timeline_notes.h"
#include "runtime/waits.h"
#include "runtime/wishes.h"

namespace mykv {

class RuntimeThread {
 public:
  RuntimeThread(RuntimeContext& context, Requests& requests, Sender& sender, PartEvents& events,
                DeviceParts& device_parts, Ending& ending, Waits& waits, Wishes& wishes, TimelineNotes& notes)
      : context_(context),
        requests_(requests),
        sender_(sender),
        events_(events),
        device_parts_(device_parts),
        ending_(ending),
        waits_(waits),
        wishes_(wishes),
        notes_(notes) {}

  // The thread's function. Returns when this rank has left or cannot go on; all its operations have ended then.
  void run();

 private:
  void work_until_leaving();
  bool work();
  bool nothing_left();
  Cause cause_of(const Cause& failure);
  void sleep(uint32_t seen);
  void poll(uint32_t seen, bool flowing, bool soon);
  bool gpus_polling() const { return context_.nccl && context_.nccl->polling(); }
  bool lacks_only_time() const { return sender_.blocked() || events_.has_finished(); }

  RuntimeContext& context_;
  Requests& requests_;
  Sender& sender_;
  PartEvents& events_;
  DeviceParts& device_parts_;
  Ending& ending_;
  Waits& waits_;
  Wishes& wishes_;
  TimelineNotes& notes_;
  bool worked_ = false;      // the thread has worked since it last waited
  bool advanced_ = false;    // some operation under way has advanced
  int64_t awake_since_ = 0;  // set only if the timeline marks cycles
  int64_t flowed_ = 0;       // when the thread last had work; coarse_now_ns()
  int64_t looked_ = 0;       // when the thread last looked for questions of other hosts; coarse_now_ns()
};

}  // namespace mykv
