#include "table/bell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ctime>

#include "base/clock.h"

namespace mykv {

namespace {
long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* until, uint32_t sleepers) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, until, nullptr, sleepers);
}
}  // namespace

void Bell::ring() {
  count_.fetch_add(1, std::memory_order_seq_cst);
  const uint32_t state = state_.load(std::memory_order_seq_cst);
  const auto sleeper = static_cast<uint32_t>((state & kHasStandIn) != 0 ? Sleeper::stand_in : Sleeper::thread);
  if ((state & sleeper) != 0) futex(&count_, FUTEX_WAKE_BITSET, 1, nullptr, sleeper);
}

void Bell::wait(uint32_t seen, int64_t timeout_us, Sleeper sleeper) {
  const int64_t until_ns = now_ns() + timeout_us * 1000;
  const timespec until{until_ns / 1000000000, until_ns % 1000000000};
  const auto bit = static_cast<uint32_t>(sleeper);
  // A ring between setting the bit and the futex call changes count_. The kernel compares count_ with `seen` before the
  // thread sleeps, so the ring is not lost.
  state_.fetch_or(bit, std::memory_order_seq_cst);
  futex(&count_, FUTEX_WAIT_BITSET, seen, &until, bit);
  state_.fetch_and(~bit, std::memory_order_seq_cst);
}

void Bell::stand_in(bool on) {
  if (on) {
    state_.fetch_or(kHasStandIn, std::memory_order_seq_cst);
  } else {
    state_.fetch_and(~kHasStandIn, std::memory_order_seq_cst);
  }
}

}  // namespace mykv
