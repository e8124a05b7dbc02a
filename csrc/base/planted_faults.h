// For tests: faults that the core meets as if MPI, the machine or another host had made them.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>

namespace mykv::testing {

// A call of MPI fails; there is no memory for what the hosts exchange; a message of another host is damaged; what a
// rank says to other hosts when it goes is lost; a thread that posts is held up for half a second before it arrives.
enum class Fault { mpi, memory, message, notice, late };
constexpr const char* kFaults[] = {"mpi", "memory", "message", "notice", "late"};

// Of each kind, how many more times it goes well; 0 and less: no fault is planted.
inline std::array<std::atomic<int64_t>, std::size(kFaults)>& planted_faults() {
  static std::array<std::atomic<int64_t>, std::size(kFaults)> planted{};
  return planted;
}

// The `count`th chance from now on is the fault. False where there is no such kind.
inline bool plant(const std::string& kind, int64_t count) {
  for (size_t k = 0; k < std::size(kFaults); ++k) {
    if (kind != kFaults[k]) continue;
    planted_faults()[k].store(count);
    return true;
  }
  return false;
}

// Whether this chance is the one. Costs a load where none is planted.
inline bool is_planted(Fault fault) {
  std::atomic<int64_t>& planted = planted_faults()[static_cast<size_t>(fault)];
  return planted.load(std::memory_order_relaxed) > 0 && planted.fetch_sub(1) == 1;
}

}  // namespace mykv::testing
