// The shipped core's only hooks for tests: simulated faults of MPI, the machine or another host, and one check. Only
// the test module plants faults.
#pragma once

#include <atomic>
#include <cstdint>
#include <iterator>

namespace mykv::testing {

// mpi: an MPI call fails. memory: there is no memory for the exchange between hosts. message: a message from another
// host is damaged. notice: the notice of a leaving rank to other hosts is lost. late: a thread that posts is delayed by
// half a second before it arrives. ring: a thread that has changed a host's table is delayed by three seconds before it
// rings the bells of the ranks that wait for the change. linger: a thread that posts lingers for ten seconds. entries:
// there is no memory for more entries of the table.
enum class Fault { mpi, memory, message, notice, late, ring, linger, entries };
constexpr const char* kFaults[] = {"mpi", "memory", "message", "notice", "late", "ring", "linger", "entries"};

// A number n for each kind of fault: the fault happens once, at the n-th opportunity from now on. The fault `entries`
// happens at each of the next n opportunities. 0 or less: never.
// Exported, so that the test module (csrc/testing/) finds the numbers by name in the loaded core.
extern "C" __attribute__((visibility("default"))) std::atomic<int64_t> mykv_planted_faults[std::size(kFaults)];

// Whether the environment variable MYKV_TEST_LOCK_ORDER is set: the runtime then checks the order of its locks.
bool checks_lock_order();

// Whether the fault happens at this opportunity. Costs one load if no fault is planted.
inline bool is_planted(Fault fault) {
  std::atomic<int64_t>& planted = mykv_planted_faults[static_cast<size_t>(fault)];
  return planted.load(std::memory_order_relaxed) > 0 && planted.fetch_sub(1) == 1;
}
// The same for a fault that happens at each of the next opportunities.
inline bool is_planted_each(Fault fault) {
  std::atomic<int64_t>& planted = mykv_planted_faults[static_cast<size_t>(fault)];
  return planted.load(std::memory_order_relaxed) > 0 && planted.fetch_sub(1) > 0;
}

}  // namespace mykv::testing
