#include "runtime/runtime_thread.h"

#include <sched.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "gpu/memory.h"
#include "runtime/spin_policy.h"

namespace mykv {

namespace {

// Sleep between polls of messages and of MPI's queues if there are several hosts and nothing is under way.
constexpr int64_t kIdlePollUs = 10000;
constexpr int64_t kDrainNs = 2000000000;  // how long MPI may keep messages queued after the last operation
constexpr int64_t kRetryUs = 1000;        // pause when the host's table, or this rank's share of memory, is full
constexpr int64_t kGpuPollUs = 200;       // interval between checks of copies, and of the streams that copies wait for
constexpr int64_t kLookNs = 100000000;    // longest interval between checks for questions from other hosts
constexpr int64_t kSleepUs = 1000000;     // upper bound of any sleep
constexpr unsigned long kSlackNs = 1000;  // timer slack of short sleeps; Linux's default is 50 us
// Sleep of an idle rank if there are several hosts. A process that does not look at the network for 500 ms is
// considered stopped.
constexpr int64_t kRestUs = 250000;
constexpr int64_t kLostPatienceNs = 2000000000;  // wait for the failure detector to name the dead process
constexpr auto kStandstillPatience =
    std::chrono::seconds(5);  // how long a leaving rank waits while agreed operations do not advance
// How long the ranks that stay wait after a rank has left; usually a notice ends the wait earlier.
constexpr auto kGonePatience = std::chrono::seconds(20);

// From begin() on, sleeps of the calling thread end on time.
class PreciseSleeps {
 public:
  PreciseSleeps() = default;
  PreciseSleeps(const PreciseSleeps&) = delete;
  PreciseSleeps& operator=(const PreciseSleeps&) = delete;
  ~PreciseSleeps() {
    if (before_ > 0) prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(before_));
  }
  void begin() {
    if (before_ > 0) return;
    before_ = prctl(PR_GET_TIMERSLACK);
    prctl(PR_SET_TIMERSLACK, kSlackNs);
  }

 private:
  int before_ = 0;
};

}  // namespace

void RuntimeThread::run() {
  prctl(PR_SET_NAME, "mykv");
  gpu::Memory::free_elsewhere();
  PreciseSleeps sleeps;
  sleeps.begin();
  try {
    work_until_leaving();
    const std::string retired = device_parts_->retired();
    const Failure local_error =
        retired.empty() ? Failure("this rank has shut mykv down", ErrorCode::left) : Failure(retired);
    const Departed gone(context_.label(), retired.empty() ? commands_.leave_reason() : retired);
    // A world of one rank leaves the table only here, after its operations have ended. Requests that a thread still
    // posts then get an error.
    if (context_.world.size() == 1) context_.table.depart(gone.rank, gone.reason);
    if (requests_.entries().empty()) {
      teardown_.end_in_order(local_error);
    } else {
      teardown_.break_down(gone, local_error, gone.failure());
    }
  } catch (const std::exception& error) {
    const Failure seen = failure_of(error);
    const Failure failure = root_failure_of(seen);
    const auto* const other = dynamic_cast<const Departed*>(&error);
    if (other != nullptr && failure == seen) {
      teardown_.break_down(*other, failure, failure);
    } else {
      const Departed gone(context_.label(), failure);
      teardown_.break_down(gone, failure, failure == seen ? gone.failure() : Failure());
    }
  }
  context_.launcher.reset();
}

// Returns when this rank leaves and no other rank needs it, or when this rank has waited long enough.
void RuntimeThread::work_until_leaving() {
  Bell& bell = context_.bell();
  Standstill standstill;
  for (;;) {
    const uint32_t seen = bell.count();
    if (!take_loop()) {  // a stand-in has the loop; it rings when it gives the loop back and work is left
      bell.wait(seen, context_.world.has_several_hosts() ? kIdlePollUs : kSleepUs);
      continue;
    }
    rests_ = false;
    if (failure_) std::rethrow_exception(failure_);
    if (awake_since_ == 0 && Timeline::marks_cycles()) awake_since_ = now_ns();
    // Read before work(), so that the last round still tells the other hosts that this rank leaves.
    const bool leaving = commands_.leaving() || !device_parts_->retired().empty();
    context_.table.beat();
    context_.table.look_after_lock();
    const bool worked = work();
    if (std::exchange(advanced_, false) || (!leaving && context_.table.departed_rank() < 0)) {
      standstill.end();
    } else if (leaving) {
      if (standstill.look() > kStandstillPatience) return;
    } else if (standstill.look() > kGonePatience && context_.world.has_several_hosts() &&
               !requests_.entries().empty()) {
      throw context_.table.departed();  // the rank that left gave up without a notice
    }
    if (worked) {
      worked_ = true;
      give_loop();
      continue;
    }
    if (leaving && nothing_left()) return;
    if (Timeline::marks_cycles() && worked_ && awake_since_ != 0) notes_.awake(awake_since_);
    const int64_t limit = rest(seen);
    awake_since_ = 0;
    rests_ = limit == kRestUs;
    give_loop();
    if (limit > 0) bell.wait(seen, limit);
  }
}

void RuntimeThread::stand_in(const std::function<bool()>& over, int64_t until_ns) {
  if (!may_stand_in()) return;
  Bell& bell = context_.bell();
  if (!take_loop()) {
    if (context_.world.has_several_hosts()) bell.ring();  // no bell rang for the requests that this thread posted
    return;
  }
  bell.stand_in(true);
  uint32_t seen = bell.count();
  bool left = true;
  try {
    left = failure_ != nullptr || stand_in_rounds(over, until_ns, &seen);
  } catch (...) {
    failure_ = std::current_exception();  // the event is consumed: the runtime's thread would not see the error again
  }
  // The order matters. The next stand-in registers with the bell after it has taken the loop. And a ring before the
  // loop is free would wake the runtime's thread before it can take the loop.
  bell.stand_in(false);
  give_loop();
  if (left || bell.count() != seen) bell.ring();
}

// Whether work is left. `seen`: the bell's count before the last round.
bool RuntimeThread::stand_in_rounds(const std::function<bool()>& over, int64_t until_ns, uint32_t* seen) {
  Bell& bell = context_.bell();
  bool last = false;
  bool rested = true;
  bool moved = false;
  PreciseSleeps sleeps;
  for (;;) {
    *seen = bell.count();
    if (needs_thread()) return true;
    if (std::exchange(rested, false) && !context_.table.lock_comes_free()) return true;
    context_.table.beat();
    context_.table.look_after_lock();
    const bool worked = work();
    worked_ |= worked;
    moved |= worked;
    advanced_ = false;
    const int64_t now = now_ns();
    if (over() || now >= until_ns) {
      // One more round here is cheaper than waking the runtime's thread, and usually finds no work.
      if (!worked || last) return worked || needs_thread() || network_polling() || (moved && rests_);
      last = true;
      continue;
    }
    if (worked) continue;
    const int64_t limit = rest(*seen, until_ns);
    if (limit > 0 && network_polling()) sleeps.begin();
    const int64_t left_ns = until_ns - now_ns();
    if (limit > 0 && left_ns > 0) bell.wait(*seen, std::min(limit, left_ns / 1000 + 1), Bell::Sleeper::stand_in);
    rested = true;
  }
}

// Whether the runtime's thread must take the loop back from a stand-in: this rank leaves or fails, a command of another
// thread is pending, or work must be retried after a pause, whose end rings no bell.
bool RuntimeThread::needs_thread() const {
  return commands_.leaving() || commands_.pending() || context_.table.departed_rank() >= 0 || lacks_only_time();
}

bool RuntimeThread::nothing_left() {
  const Agreement& agreement = context_.agreement;
  if (agreement.speaks() && !agreement.closed()) return false;  // rank 0 may not know that this rank leaves
  return !requests_.under_way().parts && !events_.has_finished() && !device_parts_->copying() && !sender_.gated() &&
         !context_.transport->polling() && !gpus_polling() && !agreement.sending();
}

// The reason given to break_down() or lose(), if either has been called or is called soon; otherwise this failure.
// After a death MPI or the table may fail before the failure detector knows which process has died.
Failure RuntimeThread::root_failure_of(const Failure& failure) {
  const int64_t begun = now_ns();
  for (;;) {
    const Failure told = commands_.break_down_reason();
    if (!told.empty()) return told;
    if (!ThreadCommands::watched().load() || commands_.leaving() || now_ns() - begun > kLostPatienceNs) return failure;
    context_.table.beat();
    usleep(kRetryUs);
  }
}

bool RuntimeThread::work() {
  bool worked = sender_.take_posted();
  bool advanced = events_.take_events();
  advanced |= events_.take_finished();
  advanced |= device_parts_->progress();
  worked |= sender_.start_part();
  advanced |= context_.transport->progress();
  if (context_.nccl) advanced |= context_.nccl->progress();
  if (context_.agreement.speaks()) {
    worked |= context_.agreement.progress();
    // Other hosts wait only a few seconds for an answer, so even a busy rank checks for questions.
    const int64_t now = coarse_now_ns();
    if (!worked || now - looked_ > kLookNs) {
      looked_ = now;
      worked |= context_.inquiry.answer_one();
    }
    teardown_.tell_departure();
  }
  if (commands_.pending()) worked |= commands_.take();
  advanced_ |= advanced;
  return worked || advanced;
}

// Spins if that pays. Returns how long to sleep afterwards (us); 0: not at all.
int64_t RuntimeThread::rest(uint32_t seen, int64_t until_ns) {
  const Requests::Under under = requests_.under_way();
  const bool flowing = context_.transport->polling() || gpus_polling() || device_parts_->copying();
  if (worked_ || flowing) flowed_ = coarse_now_ns();
  if (flowing || context_.agreement.polling() || sender_.gated()) {
    return poll(flowing, !under.large);
  }
  if (std::exchange(worked_, false) && under.parts) spin_policy_.expect_bell();
  if (under.parts && spin_policy_.spin(context_.bell(), seen, until_ns)) return 0;
  int64_t limit = kSleepUs;
  if (context_.world.has_several_hosts()) {
    const bool polls = context_.agreement.speaks() || coarse_now_ns() - flowed_ < kDrainNs;
    limit = polls ? kIdlePollUs : kRestUs;
  }
  if (lacks_only_time() || commands_.pending()) limit = kRetryUs;
  if (commands_.leaving() || !device_parts_->retired().empty()) limit = std::min(limit, kRetryUs);
  return limit;
}

// rest() for networks and GPUs, which cannot wake the thread.
int64_t RuntimeThread::poll(bool flowing, bool soon) {
  if (std::exchange(worked_, false)) spin_policy_.moved();
  int64_t pause = spin_policy_.pause(flowing, soon);
  if (device_parts_->copying() || sender_.gated() || gpus_polling()) pause = std::min(pause, kGpuPollUs);
  if (pause == 0) {
    sched_yield();
  }
  return lacks_only_time() ? std::min(pause, kRetryUs) : pause;
}

}  // namespace mykv
