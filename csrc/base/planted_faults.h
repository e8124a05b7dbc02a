// For tests: planted faults, which look to the core as if MPI, the machine or another host had caused them.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>

namespace mykv::testing {

// mpi: an MPI call fails. memory: there is no memory for the exchange between hosts. message: a message of another host
// is damaged. notice: the notice of a leaving rank to other hosts is lost. late: a thread that posts is delayed by half
// a second before it arrives.
enum class Fault { mpi, memory, message, notice, late };
constexpr const char* kFaults[] = {"mpi", "memory", "message", "notice", "late"};

// For each kind, at which of its next chances the fault happens, 1 being the next; 0 and less: no fault is planted.
inline std::array<std::atomic<int64_t>, std::size(kFaults)>& planted_faults() {
  static std::array<std::atomic<int64_t>, std::size(kFaults)> planted{};
  return planted;
}

// Plants a fault at the `count`th chance from now on. False if there is no such kind.
inline bool plant(const std::string& kind, int64_t count) {
  for (size_t k = 0; k < std::size(kFaults); ++k) {
    if (kind != kFaults[k]) continue;
    planted_faults()[k].store(count);
    return true;
  }
  return false;
}

// Whether the fault happens at this chance. Costs one load if no fault is planted.
inline bool is_planted(Fault fault) {
  std::atomic<int64_t>& planted = planted_faults()[static_cast<size_t>(fault)];
  return planted.load(std::memory_order_relaxed) > 0 && planted.fetch_sub(1) == 1;
}

}  // namespace mykv::testing
