// The runtime's thread: it advances all requests, sleeps when there is nothing to do, and shuts the runtime down. A
// thread that waits for a request may run the loop instead (a stand-in): then its result wakes one thread, not two.
//
// One thread at a time holds the loop. Only the holder uses the members of this class (but for take_gpu_note()), and so
// the state of sending, events, copies on GPUs and the end, which nothing else can reach. Comments of those classes
// call the holder "the runtime's thread". The other thread sleeps, and the bell wakes the stand-in while there is one.
// After a stand-in has returned the loop, it rings the bell for the runtime's thread if the bell has rung since it last
// checked, or if work is left. docs/model/loop.pml checks that no ring is lost.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "runtime/context.h"
#include "runtime/device_parts.h"
#include "runtime/part_events.h"
#include "runtime/parts.h"
#include "runtime/requests.h"
#include "runtime/send_queue.h"
#include "runtime/sender.h"
#include "runtime/spin_policy.h"
#include "runtime/teardown.h"
#include "runtime/thread_commands.h"
#include "runtime/timeline_notes.h"

namespace mykv {

class RuntimeThread {
 public:
  RuntimeThread(RuntimeContext& context, Requests& requests, SendQueue& queue, Parts& parts, SpinPolicy& spin_policy,
                ThreadCommands& commands, TimelineNotes& notes)
      : context_(context),
        requests_(requests),
        spin_policy_(spin_policy),
        commands_(commands),
        notes_(notes),
        device_parts_(std::make_unique<DeviceParts>(context.world, context.table, context.pinned, requests, parts)),
        sender_(context.table, requests, queue, parts, *device_parts_),
        events_(context, requests, queue, parts, *device_parts_),
        teardown_(context, requests, parts, *device_parts_, sender_, events_, commands) {}

  // The thread's function. Returns when this rank has left or broken down and all its operations have ended.
  void run();
  // Whether stand_in() may be called: not with GPUs, since CUDA's state belongs to a thread.
  bool may_stand_in() const { return !context_.gpus.any; }
  // For a thread that waits for a request: runs the loop until over() or until `until_ns` (now_ns()). Returns early if
  // another thread holds the loop, or if the runtime's thread must continue: after a failure, or to leave.
  void stand_in(const std::function<bool()>& over, int64_t until_ns);
  // A message about this rank's GPUs for the log, returned once; empty: none. Thread-safe.
  std::string take_gpu_note() { return device_parts_->take_note(); }

  // Functions for after run() has returned.

  // Whether a GPU may still use slots.
  bool gpus_use_slots() const { return device_parts_->unsafe(); }
  // Never frees CUDA's objects: in a fork they belong to the parent.
  void keep_gpu_objects() { (void)device_parts_.release(); }

 private:
  void work_until_leaving();
  bool work();
  bool take_loop() { return !loop_taken_.exchange(true, std::memory_order_seq_cst); }
  void give_loop() { loop_taken_.store(false, std::memory_order_seq_cst); }
  bool stand_in_rounds(const std::function<bool()>& over, int64_t until_ns, uint32_t* seen);
  bool needs_thread() const;
  bool nothing_left();
  Failure root_failure_of(const Failure& failure);
  int64_t rest(uint32_t seen, int64_t until_ns = INT64_MAX);
  int64_t poll(bool flowing, bool soon);
  bool gpus_polling() const { return context_.nccl && context_.nccl->polling(); }
  bool network_polling() const { return context_.transport->polling() || context_.agreement.polling(); }
  bool lacks_only_time() const { return sender_.blocked() || events_.has_finished(); }

  RuntimeContext& context_;
  Requests& requests_;
  SpinPolicy& spin_policy_;
  ThreadCommands& commands_;
  TimelineNotes& notes_;
  std::unique_ptr<DeviceParts> device_parts_;
  Sender sender_;
  PartEvents events_;
  Teardown teardown_;
  std::atomic<bool> loop_taken_{false};  // a thread holds the loop
  std::exception_ptr failure_;           // a stand-in's exception, for the runtime's thread
  bool worked_ = false;                  // the thread has worked since its last wait
  bool rests_ = false;                   // the thread sleeps for longer than messages from other hosts should wait
  bool advanced_ = false;                // an open operation has advanced since the last check
  int64_t awake_since_ = 0;              // start of this waking period; 0: asleep, or the timeline marks no cycles
  int64_t flowed_ = 0;                   // last time with work; coarse_now_ns()
  int64_t looked_ = 0;                   // last check for questions from other hosts; coarse_now_ns()
};

}  // namespace mykv
