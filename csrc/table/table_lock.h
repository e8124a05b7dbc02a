// The lock of the host's table. It records its holder, so that waiting ranks can name a rank that was stopped or died
// in the middle of a change, and can give a verdict on the table.
//
// The verdict needs no lock: it is a text that every rank reads before and after each of its changes. After the verdict
// every access to the table throws the text as an error, even in the rank that held the lock, if it continues. So no
// rank uses what that rank was changing, and no rank begins a new change.
//
// Note [why a wait for the table's lock ends]. A thread that waits without a limit of its own, such as in
// finish_pieces() and leave() of the table, looks at the lock every 50 ms:
//   - The holder has died: the robust mutex says so, and the waiting thread gives the verdict itself.
//   - The holder was stopped and continues: the lock comes free.
//   - The holder stays stopped: the stall watch, whose waits all have limits, sees the wait in longest_wait(), warns
//     with the holder's name, and gives the verdict after MYKV_STALL_ABORT_S. With MYKV_STALL_ABORT_S=0 it only warns.
//     A rank that leaves or breaks down gives the verdict after some seconds (set_patience()).
//   - Another rank gives the verdict: the next check sees it.
// A thread of MXNet's engine that arrives at an operation waits for the lock only briefly (Arriving::posting). But if
// it arrived last and did all the work of a small operation, only this thread can finish the operation: it waits as
// above.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "base/error.h"

namespace mykv {

// The mutex of the shared table. Every caller gives a time limit.

// A mutex between processes; robust, so that the death of its holder is reported instead of a deadlock.
class SharedMutex {
 public:
  enum class Result {
    taken,
    busy,
    inherited,  // its holder has died; this thread has the mutex, and no thread can lock it after unlock()
    unusable,   // a holder has died earlier
  };
  void init();
  Result try_lock();
  Result try_lock(int64_t timeout_us);  // busy: the mutex was not free in that time
  void unlock() { pthread_mutex_unlock(&mutex_); }

 private:
  pthread_mutex_t mutex_;
};

// A rank keeps the table locked; the text names it.
struct TableLocked : Error {
  TableLocked(const std::string& text, int local_rank) : Error(text, ErrorCode::table_locked), holder(local_rank) {}
  int holder;  // local rank, or -1: the holder was stopped before it had recorded itself
};

// No rank of this host may use the table; the text says why.
struct TableVerdict : Error {
  explicit TableVerdict(const std::string& text) : Error(text, ErrorCode::table_locked) {}
};

class TableLock {
 public:
  // In shared memory. All zero: no verdict, and the mutex is not initialized.
  struct Shared {
    SharedMutex mutex;
    std::atomic<uint64_t> holding{
        0};  // how often the lock was taken, times kHolderRanks, plus the holder's local rank + 1
  };
  // In shared memory, on cache lines of its own, since every rank reads it often.
  struct alignas(64) Verdict {
    static constexpr size_t kTextBytes = 1024;
    std::atomic<uint32_t> state{0};  // 0: the table is good; kWriting, kGiven
    char text[kTextBytes];
  };
  // Data of the table that the lock needs.
  struct Callbacks {
    std::vector<int> ranks;                          // the labels of the host's ranks
    std::function<void()> beat;                      // heartbeat of this rank while it waits
    std::function<std::vector<int>()> unresponsive;  // local ranks without a heartbeat for some seconds
    std::function<void()> ring_all;
  };

  TableLock(Shared& shared, Verdict& verdict, int local_rank, Callbacks around);

  // Calls run() under the lock and returns its result. Throws Error if a verdict was given before run() or during it,
  // since this rank may have been stopped in run(). Throws TableLocked when a rank keeps the lock for `limit_us`; 0:
  // waits without limit.
  template <class Run>
  auto run(Run&& run, int64_t limit_us = 0) {
    if (!take(limit_us)) throw locked();
    if constexpr (std::is_void_v<decltype(run())>) {
      {
        const Holder holder{*this};
        run();
      }
      require_good();
    } else {
      auto result = [&] {
        const Holder holder{*this};
        return run();
      }();
      require_good();
      return result;
    }
  }
  // The same for callers that must not block: throws TableLocked when a rank keeps the lock for `limit_us`.
  template <class Run>
  auto look(int64_t limit_us, Run&& run) {
    if (!take(limit_us)) throw locked();
    const Holder holder{*this};
    return run();
  }

  // False if one rank keeps the lock for `limit_us`. Costs one load if no rank has it.
  bool comes_free(int64_t limit_us);

  // Throws Error if there was a verdict. Costs one load.
  void require_good() const {
    if (verdict_.state.load(std::memory_order_acquire) != 0) throw TableVerdict(verdict_text());
  }
  // Gives the verdict if the lock's holder has died; does not wait.
  void notice_death();
  // Ends the use of the table by all ranks. Only the first verdict's reason is kept.
  void give_verdict(const std::string& reason);
  // From now on this process gives the verdict if one rank keeps the lock for `limit_us` while a thread of this
  // process waits for it.
  void set_patience(int64_t limit_us, const std::string& why);
  // The longest time that a thread of this process has waited for the lock so far, in nanoseconds; 0: no thread waits,
  // or none for longer than a few hundredths of a second.
  int64_t longest_wait() const;
  // For tests: makes a thread end the process if it takes this lock while it holds `inner`. In arrive() threads take
  // `inner` while they hold this lock, so the reverse order could deadlock.
  void comes_before(std::mutex& inner) { inner_ = &inner; }
  // The error that names the rank that keeps the lock.
  TableLocked locked() const;

 private:
  struct Holder {
    explicit Holder(TableLock& l) : lock(l) {}
    Holder(const Holder&) = delete;
    Holder& operator=(const Holder&) = delete;
    ~Holder() { lock.give_back(); }
    TableLock& lock;
  };
  // False when one rank kept the lock for `limit_us`; 0: waits until there is a verdict.
  bool take(int64_t limit_us);
  bool wait(int64_t limit_us);
  void give_back();
  [[noreturn]] void died(SharedMutex::Result result);
  std::string verdict_text() const;
  int holder() const;

  static constexpr uint64_t kHolderRanks = 1 << 16;
  static constexpr uint32_t kWriting = 1, kGiven = 2;

  Shared& shared_;
  Verdict& verdict_;
  const int local_rank_;
  const Callbacks around_;
  std::mutex* inner_ = nullptr;
  mutable std::mutex mutex_;  // guards the members below, which belong to this process
  std::multiset<int64_t> waits_;
  int64_t patience_us_ = 0;  // 0: endless
  std::string impatient_;    // the reason given to set_patience()
};

}  // namespace mykv
