// The stall watch of all groups, for a thread of Python.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace mykv {

// Waits until a group stalls, or goes on again: (whether it goes on, the sentence) for each report. None after
// end_stall_watch(), or if both limits are 0. For one thread of Python, which must not hold the GIL.
std::optional<std::vector<std::pair<bool, std::string>>> next_stalls(double warn_seconds, double abort_seconds);
void begin_stall_watch();
void end_stall_watch();

}  // namespace mykv
