// The shared table and its bells without runtimes around them.
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <thread>

#include "ranks.h"
#include "scenarios.h"
#include "table/host_table.h"
#include "world/world.h"

namespace mykv::testing {

void log_overruns(uint32_t seed) {
  constexpr uint32_t kOperations = 3 << 16;  // one and a half times the log, at two events for each operation
  ThreadHost host(2, 4096);
  HostTable first(host.segment(), {0, 1}, 0, 0, false);
  HostTable second(host.segment(), {0, 1}, 1, 0, false);
  HostTable reader(host.segment(), {0, 1}, 1, 0, false);
  std::atomic<bool> over{false};
  std::atomic<uint32_t> operations{0};
  std::thread writer([&] {
    const std::string name = "one", signature = "the same";
    HostTable::Arriving arriving{Key{1, 2}, &name, &signature, nullptr, LongText{}, Operation{}, 0, 1, kAnybody};
    arriving.operation.count = 1;
    for (uint32_t k = 0; k < kOperations; ++k) {
      first.arrive(arriving, 0, [](const ArriveResult&) {});
      const ArriveResult arrival = second.arrive(arriving, 0, [](const ArriveResult&) {});
      first.finish_pieces(arrival.entry, 1);
      first.leave(arrival.entry);
      second.leave(arrival.entry);
      operations.store(k + 1, std::memory_order_relaxed);
    }
    over.store(true);
  });
  Random random(seed);
  std::string wrong;
  uint64_t events = 0, overruns = 0, edge = EventLog::kEvents - 2;
  uint64_t last = 0;  // the last event as a number that grows by one
  while (wrong.empty()) {
    const bool was_over = over.load();
    TableEvent event;
    bool overrun;
    // At the edge of the log all the while, so that some slots of the log are read just when they are written anew.
    // Without an order between the threads that could hide a race.
    const uint64_t written = 2 * uint64_t{operations.load(std::memory_order_relaxed)};
    if (!was_over && last != 0 && written < last + edge) continue;
    if (!reader.next_event(&event, &overrun)) {
      if (was_over) break;
      continue;
    }
    if (overrun) {
      last = 0;
      ++overruns;
      edge = EventLog::kEvents - below(random, 8);
      continue;
    }
    ++events;
    const uint64_t number = 2 * uint64_t{event.generation} + (event.type == TableEvent::Type::done);
    if (event.entry != 0 || event.type == TableEvent::Type::announced || (last != 0 && number != last + 1)) {
      wrong = "event " + std::to_string(number) + " came after " + std::to_string(last);
    }
    last = number;
  }
  writer.join();
  require(wrong.empty(), wrong);
  require(events > 1000 && overruns > 0, "the reader was never overtaken");
}

void locks_given_up(uint32_t seed) {
  constexpr int kRanks = 4;
  constexpr int kTurns = 8;
  Random random(seed);
  for (int turn = 0; turn < kTurns; ++turn) {
    ThreadHost host(kRanks, 4096);
    std::vector<std::unique_ptr<HostTable>> tables;
    for (int r = 0; r < kRanks; ++r) {
      tables.push_back(std::make_unique<HostTable>(host.segment(), std::vector<int>{0, 1, 2, 3}, r, false, false));
    }
    const int keeper = static_cast<int>(below(random, kRanks));
    // Instead of a verdict at once, the others get a limit for their patience.
    const bool tired = below(random, 2) == 0;
    std::atomic<bool> kept{false};
    std::atomic<int> warm{0}, over{0};
    int64_t counted = 0;  // under the lock
    Ranks::parallel(kRanks, [&](int rank) {
      TableLock& lock = tables[static_cast<size_t>(rank)]->lock();
      for (int k = 0; k < 100; ++k) lock.run([&] { ++counted; });
      warm.fetch_add(1);
      while (warm.load() < kRanks) usleep(100);
      std::string error;
      if (rank == keeper) {
        try {
          lock.run([&] {
            kept.store(true);
            while (over.load() < kRanks - 1) usleep(100);
          });
        } catch (const TableVerdict& verdict) {
          error = verdict.what();
        }
      } else {
        while (!kept.load()) usleep(100);
        try {
          if (tired) {
            lock.set_patience(100000, "rank " + std::to_string(rank) + " is tired");
          } else if (rank == (keeper + 1) % kRanks) {
            lock.give_verdict("no more of " + std::string(lock.locked().what()));
          }
          lock.run([] {});
        } catch (const TableVerdict& verdict) {
          error = verdict.what();
        }
        over.fetch_add(1);
      }
      require(error.find("kept locked by rank " + std::to_string(keeper)) != std::string::npos, "no error: " + error);
      bool again = true;
      try {
        lock.require_good();
        again = false;
      } catch (const TableVerdict& verdict) {
        again = error == verdict.what();
      }
      require(again, "the verdict has changed");
    });
    require(counted == kRanks * 100, "the lock does not lock");
  }
}

void bells(uint32_t seed) {
  constexpr uint32_t kTurns = 20000;
  constexpr int64_t kNever = 20000000;  // us; a lost wake-up is seen by it
  Bell bell[2];
  std::atomic<uint32_t> ball[2] = {{0}, {0}};
  std::atomic<int64_t> longest_us{0};
  Ranks::parallel(2, [&](int me) {
    Random random(seed + static_cast<uint32_t>(me));
    for (uint32_t turn = 1; turn <= kTurns; ++turn) {
      if (me == 0 || turn > 1) {
        for (uint32_t seen = bell[me].count(); me == 1 || turn > 1; seen = bell[me].count()) {
          if (ball[me].load(std::memory_order_relaxed) >= turn - (me == 0)) break;
          const int64_t before = now_ns();
          bell[me].wait(seen, kNever);
          longest_us.store(std::max(longest_us.load(), (now_ns() - before) / 1000));
        }
      }
      if (below(random, 50) == 0) usleep(static_cast<useconds_t>(below(random, 50)));
      ball[1 - me].store(turn, std::memory_order_relaxed);
      bell[1 - me].ring();
    }
  });
  require(longest_us.load() < kNever / 2, "a wake-up was lost");
}

}  // namespace mykv::testing
