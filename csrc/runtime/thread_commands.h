// What other threads ask of a runtime's thread, since only that thread may call MPI or end the runtime.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "agreement/inquiry.h"
#include "runtime/context.h"
#include "runtime/requests.h"

namespace mykv {

class ThreadCommands {
 public:
  ThreadCommands(RuntimeContext& context, Requests& requests) : context_(context), requests_(requests) {}

  // For all threads.
  // The thread ends, after it has done what the other ranks need.
  void leave(const std::string& reason);
  bool leaving() const { return leaving_.load(); }
  // The reason given to leave().
  std::string leave_reason();
  // The thread fails with this reason.
  void break_down(const Failure& reason);
  // The same, since a process of this world has died: the cause of all later failures.
  void lose(const Failure& reason);
  bool lost() const { return lost_.load(); }
  // The reason given to break_down() or lose(); empty: not called.
  Failure break_down_reason();
  // Several hosts: rank 0 is asked to end these operations, with these reasons.
  void give_up(const std::vector<std::pair<Key, Failure>>& operations);
  // What the other hosts know of these operations. Waits some seconds for hosts that do not answer. Asks none once no
  // request is taken any more, since the thread may have ended.
  std::vector<Inquiry::Answer> ask_hosts(const std::vector<Key>& keys);
  // Whether a failure detector calls lose() soon after a process has died. One flag for all runtimes of this process.
  static std::atomic<bool>& watched();

  // For the runtime's thread.
  // Whether there is something for take(), or a message about it is still on its way.
  bool pending() const { return pending_.load(std::memory_order_acquire); }
  // Does what was asked for. True if there was something; throws Error with the reason of break_down().
  bool take();

 private:
  struct Question {
    std::vector<Key> keys;
    bool asked = false;
    std::vector<Inquiry::Answer> answers;
  };

  RuntimeContext& context_;
  Requests& requests_;

  std::mutex mutex_;  // guards the members of this paragraph
  std::shared_ptr<Question> question_;
  std::deque<std::pair<Key, Failure>> to_give_up_;
  Failure break_down_reason_;
  std::string leave_reason_;
  std::condition_variable answered_;

  std::atomic<bool> pending_{false};
  std::mutex asking_mutex_;  // one question at a time
  std::atomic<bool> leaving_{false};
  std::atomic<bool> lost_{false};
};

}  // namespace mykv
