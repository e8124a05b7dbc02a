// Turns MPI's return codes into Errors.
#pragma once

#include <mpi.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/error.h"
#include "base/planted_faults.h"

namespace mykv {

// Throws Error if `code`, returned by the call that `what` names, is not MPI_SUCCESS.
inline void check_mpi(int code, const char* what) {
  if (testing::is_planted(testing::Fault::mpi)) code = MPI_ERR_OTHER;
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING + 1] = {};
  int length = 0;  // Open MPI counts the terminating zero too
  MPI_Error_string(code, text, &length);
  throw Error(std::string("MPI failed in ") + what + ": " + text, ErrorCode::mpi);
}

// Messages and bytes sent to or received from other hosts. Any thread may read the counts.
struct Traffic {
  void add(size_t some) {
    messages.fetch_add(1, std::memory_order_relaxed);
    bytes.fetch_add(some, std::memory_order_relaxed);
  }
  std::atomic<uint64_t> messages{0};
  std::atomic<uint64_t> bytes{0};
};

}  // namespace mykv
