#include "base/planted_faults.h"

#include <cstdlib>

namespace mykv::testing {

std::atomic<int64_t> mykv_planted_faults[std::size(kFaults)] = {};

bool checks_lock_order() { return std::getenv("MYKV_TEST_LOCK_ORDER") != nullptr; }

}  // namespace mykv::testing
