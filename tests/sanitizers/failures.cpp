// What goes wrong: refusals, differences, operations that are given up, ranks that leave.
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "ranks.h"
#include "scenarios.h"

namespace mykv::testing {

namespace {

bool holds(const std::optional<std::string>& text, const std::string& part) {
  return text && text->find(part) != std::string::npos;
}

int32_t sum_of_all(int size) { return (1 << size) - 1; }

void require_sum(Sum& sum, const std::string& name, int size) {
  const std::optional<std::string> error = sum.outcome.wait(name);
  require(!error, name + " failed: " + error.value_or(""));
  for (int32_t value : sum.values) require(value == sum_of_all(size), name + " has a wrong sum");
}

}  // namespace

void failing_requests(uint32_t seed) {
  Ranks ranks(3);
  Random random(seed);
  struct Step {
    size_t count;
    int fate;  // 0: nothing; 1: a rank refuses; 2: a rank differs
    int who;
  };
  std::vector<Step> steps;
  for (int k = 0; k < 40; ++k) {
    steps.push_back(
        {1 + below(random, 3) * 40000, static_cast<int>(below(random, 3)), static_cast<int>(below(random, 3))});
  }
  ranks.each([&](int rank) {
    Random mine(seed + static_cast<uint32_t>(rank));
    std::vector<std::unique_ptr<Sum>> sums;
    std::vector<Outcome> refused(steps.size());
    for (size_t k = 0; k < steps.size(); ++k) {
      const Step& step = steps[k];
      const std::string name = "step" + std::to_string(k % 7);
      if (step.fate == 1 && step.who == rank) {
        Request request = request_of(ranks[rank], name, Kind::allreduce, 1);
        request.refusal = "its array is ill";
        request.done = refused[k].done();
        ranks[rank].post(std::move(request));
        sums.push_back(nullptr);
      } else {
        const bool differs = step.fate == 2 && step.who == rank;
        sums.push_back(std::make_unique<Sum>(ranks[rank], name, step.count + differs));
      }
      if (below(mine, 3) == 0) usleep(static_cast<useconds_t>(below(mine, 500)));
    }
    for (size_t k = 0; k < steps.size(); ++k) {
      const std::string name = "step" + std::to_string(k % 7);
      if (steps[k].fate == 0) {
        require_sum(*sums[k], name, ranks.size());
        continue;
      }
      const std::optional<std::string> error = sums[k] ? sums[k]->outcome.wait(name) : refused[k].wait(name);
      const std::string wanted = steps[k].fate == 1
                                     ? "was refused by rank " + std::to_string(steps[k].who) + ": its array is ill"
                                     : "differs between ranks";
      require(holds(error, wanted), name + " should have failed, but: " + error.value_or("it did not"));
    }
  });
}

void given_up(uint32_t seed) {
  Ranks ranks(3);
  Random random(seed);
  for (int round = 0; round < 25; ++round) {
    const int late = static_cast<int>(below(random, 3));
    const int who = static_cast<int>(below(random, 3));
    const size_t count = 1 + below(random, 3) * 40000;
    const auto wait_us = static_cast<useconds_t>(below(random, 600));
    const auto late_us = static_cast<useconds_t>(below(random, 1200));
    std::vector<std::optional<std::string>> errors(3);
    ranks.each([&](int rank) {
      if (rank == late) usleep(late_us);
      Sum sum(ranks[rank], "lost", count);
      if (rank == who) {
        usleep(wait_us);
        ranks[rank].give_up({{"lost", std::string("nobody wants it")}});
      }
      errors[static_cast<size_t>(rank)] = sum.outcome.wait("lost");
      if (errors[static_cast<size_t>(rank)]) {
        require(holds(errors[static_cast<size_t>(rank)], "nobody wants it"), "another error");
      } else {
        require_sum(sum, "lost", 3);
      }
      Sum next(ranks[rank], "next", count);
      require_sum(next, "next", 3);
    });
    // Parts may have other fates, but an operation has the same one everywhere.
    require(errors[0].has_value() == errors[1].has_value() && errors[1].has_value() == errors[2].has_value(),
            "it was given up on some ranks only");
  }
}

void arrays_after_errors(uint32_t seed) {
  constexpr size_t kCount = 3 << 20;  // int32: 48 chunks
  Random random(seed);
  for (int round = 0; round < 4; ++round) {
    Ranks ranks(3);
    const int leaver = static_cast<int>(below(random, 3));
    const auto when_us = static_cast<useconds_t>(below(random, 10000));
    ranks.each([&](int rank) {
      const std::shared_ptr<Buffer> buffer =
          std::make_shared<Buffer>(ranks[rank].shared_from_this(), kCount * sizeof(int32_t));
      buffer->commit(buffer->bytes());
      auto* data = reinterpret_cast<int32_t*>(buffer->data());
      std::fill(data, data + kCount, 1 << rank);
      Request request = request_of(ranks[rank], "bucket", Kind::allreduce, kCount);
      request.operation.in_place = true;
      request.in_place = buffer->offset();
      request.owner = buffer;
      Outcome outcome;
      request.done = outcome.done();
      ranks[rank].post(std::move(request));
      if (rank == leaver) {
        usleep(when_us);
        ranks[rank].break_down(std::string("it had enough"));
      }
      const int32_t mine = outcome.wait("bucket") ? -1 - rank : sum_of_all(3);
      if (mine < 0) std::fill(data, data + kCount, mine);
      usleep(3000);
      const size_t kept = static_cast<size_t>(std::count(data, data + kCount, mine));
      require(kept == kCount, std::to_string(kCount - kept) + " elements were written after the end");
    });
  }
}

void departures(uint32_t seed) {
  Random random(seed);
  for (int round = 0; round < 6; ++round) {
    Ranks ranks(3);
    const int leaver = static_cast<int>(below(random, 3));
    const bool breaks = below(random, 2) == 0;
    const auto when_us = static_cast<useconds_t>(below(random, 15000));
    const uint32_t base = random();
    std::thread leaving([&] {
      usleep(when_us);
      if (breaks) {
        ranks[leaver].break_down(std::string("it had enough"));
      } else {
        ranks[leaver].leave("it had enough");
      }
    });
    try {
      ranks.each([&](int rank) {
        Random mine(base + static_cast<uint32_t>(rank));
        std::vector<std::pair<std::string, std::unique_ptr<Sum>>> sums;
        for (int k = 0; k < 60; ++k) {
          const std::string name = "sum" + std::to_string(k);
          sums.emplace_back(name, std::make_unique<Sum>(ranks[rank], name, 1 + static_cast<size_t>(k % 3) * 40000));
          if (below(mine, 3) == 0) usleep(static_cast<useconds_t>(below(mine, 600)));
        }
        for (auto& [name, sum] : sums) {
          const std::optional<std::string> error = sum->outcome.wait(name);
          if (!error) {
            require_sum(*sum, name, 3);
          } else {
            require(holds(error, "it had enough"), "another error: " + *error);
          }
        }
        Sum late(ranks[rank], "late", 10);
        if (rank != leaver) {
          const std::optional<std::string> error = late.outcome.wait("late");
          require(!error || holds(error, "it had enough"), "another error: " + error.value_or(""));
        } else {
          (void)late.outcome.wait("late");
        }
      });
    } catch (...) {
      leaving.join();
      throw;
    }
    leaving.join();
  }
}

void stall_questions(uint32_t seed) {
  Ranks ranks(3);
  Random random(seed);
  for (int round = 0; round < 15; ++round) {
    const int late = static_cast<int>(below(random, 3));
    const std::string name = "slow" + std::to_string(round % 2);
    std::atomic<int> asked{0};
    ranks.each([&](int rank) {
      if (rank == late) {
        // Until the others have asked for this rank.
        for (int ms = 0; asked.load() < 2 && ms < 30000; ++ms) {
          for (const std::vector<int>& come : ranks[rank].waiting_for_this({name}, "")) {
            require(std::find(come.begin(), come.end(), rank) == come.end(), "a rank waits for itself");
          }
          usleep(1000);
        }
        Sum sum(ranks[rank], name, 50000);
        require_sum(sum, name, 3);
        return;
      }
      Sum sum(ranks[rank], name, 50000);
      bool told = false;
      for (int ms = 0; !told && ms < 30000; ++ms) {
        for (const Waiting& waiting : ranks[rank].waiting(0, name)) {
          require(waiting.name == name && waiting.unknown.empty(), "an answer about something else");
          told = told || (!waiting.complete && waiting.missing == std::vector<int>{late});
        }
        usleep(1000);
      }
      ++asked;
      require(told, "nobody said that rank " + std::to_string(late) + " is late");
      require_sum(sum, name, 3);
    });
  }
}

}  // namespace mykv::testing
