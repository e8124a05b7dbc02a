// ranks [--rounds N] [--seed N] [SCENARIO...]: each scenario N times, with seeds that count up; all of them, or those
// named.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "scenarios.h"

int main(int count, char** arguments) {
  using namespace mykv::testing;
  struct Scenario {
    const char* name;
    void (*run)(uint32_t seed);
    int every;  // rounds: some take long, and show all they can in one
  };
  const Scenario scenarios[] = {
      {"random_operations", random_operations, 1},
      {"operations_on_a_timeline", operations_on_a_timeline, 2},
      {"failing_requests", failing_requests, 1},
      {"given_up", given_up, 1},
      {"departures", departures, 1},
      {"arrays_after_errors", arrays_after_errors, 2},
      {"stall_questions", stall_questions, 2},
      {"log_overruns", log_overruns, 10},
      {"locks_given_up", locks_given_up, 5},
      {"bells", bells, 5},
  };
  int rounds = 1;
  uint32_t seed = 1;
  std::vector<std::string> names;
  for (int k = 1; k < count; ++k) {
    const std::string word = arguments[k];
    if (word == "--rounds" && k + 1 < count) {
      rounds = std::atoi(arguments[++k]);
    } else if (word == "--seed" && k + 1 < count) {
      seed = static_cast<uint32_t>(std::atoi(arguments[++k]));
    } else {
      names.push_back(word);
    }
  }
  size_t run = 0;
  for (const Scenario& scenario : scenarios) {
    bool wanted = names.empty();
    for (const std::string& name : names) wanted = wanted || name == scenario.name;
    if (!wanted) continue;
    ++run;
    const auto begun = std::chrono::steady_clock::now();
    for (int round = 0; round < rounds; round += scenario.every) {
      try {
        scenario.run(seed + static_cast<uint32_t>(round));
      } catch (const std::exception& error) {
        std::printf("%s, seed %u: FAILED: %s\n", scenario.name, seed + static_cast<uint32_t>(round), error.what());
        std::fflush(stdout);
        std::_Exit(1);  // other ranks may still wait for this one
      }
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begun;
    std::printf("%-26s %5.1f s\n", scenario.name, seconds.count());
    std::fflush(stdout);
  }
  if (run < names.size() || run == 0) {
    std::fprintf(stderr, "there is no such scenario\n");
    return 2;
  }
  return 0;
}
