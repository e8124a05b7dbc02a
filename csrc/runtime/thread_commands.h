// Commands of other threads to the runtime's thread, since only that thread may call MPI or end the runtime.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "agreement/agreement.h"
#include "agreement/inquiry.h"
#include "runtime/requests.h"
#include "table/host_table.h"
#include "world/world.h"

namespace mykv {

class ThreadCommands {
 public:
  ThreadCommands(const World& world, HostTable& table, Agreement& agreement, Inquiry& inquiry, Requests& requests)
      : world_(world), table_(table), agreement_(agreement), inquiry_(inquiry), requests_(requests) {}

  // Functions for all threads.

  // Makes the thread end after its work for the other ranks.
  void leave(const std::string& reason);
  bool leaving() const { return leaving_.load(); }
  // The reason given to leave().
  std::string leave_reason();
  // Makes the thread fail with this reason.
  void break_down(const Failure& reason);
  // Sets the reason of break_down() to the death of a process of this world. Later calls of break_down() keep this
  // reason, since the death causes their failures.
  void lose(const Failure& reason);
  bool lost() const { return lost_.load(); }
  // The reason given to break_down() or lose(); empty: not called.
  Failure break_down_reason();
  // With several hosts: asks rank 0 to end these operations, with these reasons.
  void give_up(const std::vector<std::pair<Key, Failure>>& operations);
  // Asks the other hosts for the state of these operations. Waits a few seconds for hosts that do not answer. Returns
  // nothing once new requests are rejected, since the thread may have ended.
  std::vector<Inquiry::Answer> ask_hosts(const std::vector<Key>& keys);
  // Whether a failure detector calls lose() soon after a process has died. One flag for all runtimes of this process.
  static std::atomic<bool>& watched();

  // Functions for the runtime's thread.

  // Whether take() has something to do, or still sends a message.
  bool pending() const { return pending_.load(std::memory_order_acquire); }
  // Executes the commands. True if there were any. Throws Error with the reason of break_down() or lose().
  bool take();

 private:
  struct Question {
    std::vector<Key> keys;
    bool asked = false;
    std::vector<Inquiry::Answer> answers;
  };

  const World& world_;
  HostTable& table_;
  Agreement& agreement_;
  Inquiry& inquiry_;
  Requests& requests_;

  std::mutex mutex_;  // guards the members of this paragraph
  std::shared_ptr<Question> question_;
  std::deque<std::pair<Key, Failure>> to_give_up_;
  Failure break_down_reason_;
  std::string leave_reason_;
  std::condition_variable answered_;

  std::atomic<bool> pending_{false};
  std::mutex asking_mutex_;  // held while a question is open, so that only one question is open at a time
  std::atomic<bool> leaving_{false};
  std::atomic<bool> lost_{false};
};

}  // namespace mykv
