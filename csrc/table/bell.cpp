#include "table/bell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ctime>

namespace mykv {

namespace {
long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr, 0);
}
}  // namespace

void Bell::ring() {
  count_.fetch_add(1, std::memory_order_seq_cst);
  if (sleeping_.load(std::memory_order_seq_cst) != 0) futex(&count_, FUTEX_WAKE, 1, nullptr);
}

void Bell::wait(uint32_t seen, int64_t timeout_us) {
  const timespec timeout{timeout_us / 1000000, (timeout_us % 1000000) * 1000};
  // A ring between the store and the call changes count_, and the kernel compares it with `seen` before it sleeps.
  sleeping_.store(1, std::memory_order_seq_cst);
  futex(&count_, FUTEX_WAIT, seen, &timeout);
  sleeping_.store(0, std::memory_order_seq_cst);
}

}  // namespace mykv
