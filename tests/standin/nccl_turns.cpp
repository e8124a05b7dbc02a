// Turns of operations at their device.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>

#include "nccl.h"

namespace standin {
namespace {

// Which operation of a device runs: one at a time. With STANDIN_NCCL_ORDER=launch they take turns in the order in which
// they were launched, so that ranks which launch in different orders always wait for each other in a ring. With "ready"
// whichever stream comes first takes the device, as it may be on a real one: programs that keep no order by events
// between their communicators' streams hang now and then.
class Turns {
 public:
  uint64_t launched(int device, const Comm* comm) {
    std::lock_guard<std::mutex> lock(lock_);
    waiting_[device].push_back({++tickets_, comm});
    return tickets_;
  }

  bool take(int device, uint64_t ticket, const Comm& comm) {
    std::unique_lock<std::mutex> lock(lock_);
    while (!mine(device, ticket)) {
      if (comm.stopped()) return false;
      changed_.wait_for(lock, std::chrono::milliseconds(20));
    }
    running_[device] = ticket;
    return true;
  }

  void done(int device, uint64_t ticket) {
    std::lock_guard<std::mutex> lock(lock_);
    auto& all = waiting_[device];
    all.erase(std::find_if(all.begin(), all.end(), [&](const Entry& entry) { return entry.ticket == ticket; }));
    if (running_[device] == ticket) running_[device] = 0;
    changed_.notify_all();
  }

  void wake() { changed_.notify_all(); }

 private:
  struct Entry {
    uint64_t ticket;
    const Comm* comm;
  };

  bool mine(int device, uint64_t ticket) {
    if (running_[device]) return false;
    const Comm* comm = nullptr;
    for (const Entry& entry : waiting_[device])
      if (entry.ticket == ticket) comm = entry.comm;
    for (const Entry& entry : waiting_[device])  // by ticket; those of one communicator keep their order in any case
      if (strict_ || entry.comm == comm) return entry.ticket == ticket;
    return false;
  }

  std::mutex lock_;
  std::condition_variable changed_;
  std::map<int, std::vector<Entry>> waiting_;
  std::map<int, uint64_t> running_;
  uint64_t tickets_ = 0;
  bool strict_ = [] {
    const char* text = std::getenv("STANDIN_NCCL_ORDER");
    return !text || std::strcmp(text, "ready") != 0;
  }();
};

Turns& turns() {
  static Turns* made = new Turns;
  return *made;
}

}  // namespace

uint64_t turn_launched(const Comm& comm) { return turns().launched(comm.device, &comm); }
bool turn_take(const Comm& comm, uint64_t ticket) { return turns().take(comm.device, ticket, comm); }
void turn_done(const Comm& comm, uint64_t ticket) { turns().done(comm.device, ticket); }
void wake_turns() { turns().wake(); }

}  // namespace standin
