// The lock of the host's table. It knows who holds it, so that ranks that wait for one that was stopped in the middle
// of a change, or died there, can say so, and can give the table up.
//
// Giving up needs no lock: it is a verdict, which every rank reads before and after each of its changes. From then on
// whoever comes near the table gets it as an error, also the rank that held the lock, when it goes on: what it was
// changing is used by nobody any more, and it begins nothing new.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "table/shared_mutex.h"

namespace mykv {

// A rank keeps the table locked; the text names it.
struct TableLocked : Error {
  TableLocked(const std::string& text, int local_rank) : Error(text), holder(local_rank) {}
  int holder;  // local rank, or -1: it was stopped before it could say that it has the lock
};

// Nobody of this host uses the table any more; the text says why.
struct TableGivenUp : Error {
  using Error::Error;
};

class TableLock {
 public:
  // In shared memory; all zero is a good table whose mutex is not made yet.
  struct Shared {
    SharedMutex mutex;
    std::atomic<uint64_t> holding{0};  // how often it was taken, times kTurn, plus the holder's local rank plus one
  };
  // In shared memory, apart from what changes often, since everybody reads it all the time.
  struct alignas(64) Verdict {
    static constexpr size_t kTextBytes = 1024;
    std::atomic<uint32_t> state{0};  // 0: the table is good; kWriting, kGivenUp
    char text[kTextBytes];
  };
  // What the lock wants of those around it.
  struct Callbacks {
    std::vector<int> ranks;                          // what messages call each rank of the host
    std::function<void()> beat;                      // this rank lives, though it waits
    std::function<std::vector<int>()> unresponsive;  // local ranks that have not beaten for a while
    std::function<void()> ring_all;
  };

  TableLock(Shared& shared, Verdict& verdict, int local_rank, Callbacks around);

  // Runs it under the lock and returns what it returns. Throws Error where the table was given up, before it has run or
  // after: this rank may have been stopped in the middle.
  template <class Run>
  auto run(Run&& run) {
    take(0);
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
  // The same for those who must not wait themselves: throws TableLocked when one rank keeps the lock for `limit_us`.
  template <class Run>
  auto look(int64_t limit_us, Run&& run) {
    if (!take(limit_us)) throw locked();
    const Holder holder{*this};
    return run();
  }

  // Throws Error where the table was given up. Costs a load.
  void require_good() const {
    if (verdict_.state.load(std::memory_order_acquire) != 0) throw TableGivenUp(verdict_text());
  }
  // Gives the table up if the lock's holder has died; does not wait.
  void notice_death();
  // Gives the table up for all ranks. The first reason counts.
  void give_up(const std::string& reason);
  // From now on this process gives the table up where one rank keeps the lock for `limit_us`, whatever others wait for.
  void lose_patience(int64_t limit_us, const std::string& why);
  // How long the oldest thread of this process has waited for the lock, in nanoseconds; 0: none does.
  int64_t longest_wait() const;
  // For tests: from now on a thread that has this mutex and takes the lock ends the process. arrive() takes them in the
  // other order.
  void comes_before(std::mutex& inner) { inner_ = &inner; }
  // The lock cannot be had: who has it, in a sentence.
  TableLocked locked() const;

 private:
  struct Holder {
    explicit Holder(TableLock& l) : lock(l) {}
    Holder(const Holder&) = delete;
    Holder& operator=(const Holder&) = delete;
    ~Holder() { lock.give_back(); }
    TableLock& lock;
  };
  // False when one rank kept it for `limit_us`; 0: waits until the table is given up.
  bool take(int64_t limit_us);
  bool wait(int64_t limit_us);
  void give_back();
  [[noreturn]] void died(SharedMutex::Result result);
  std::string verdict_text() const;
  int holder() const;

  static constexpr uint64_t kTurn = 1 << 16;
  static constexpr uint32_t kWriting = 1, kGivenUp = 2;

  Shared& shared_;
  Verdict& verdict_;
  const int local_rank_;
  const Callbacks around_;
  std::mutex* inner_ = nullptr;
  mutable std::mutex mutex_;  // guards the rest, which is of this process
  std::multiset<int64_t> waits_;
  int64_t patience_us_ = 0;  // 0: endless
  std::string impatient_;    // why
};

}  // namespace mykv
