// Turns MPI's return codes into Errors.
#pragma once

#include <mpi.h>

#include <string>

#include "base/error.h"
#include "base/planted_faults.h"

namespace mykv {

// Throws Error if `code`, returned by the call that `what` names, is not MPI_SUCCESS.
inline void check_mpi(int code, const char* what) {
  if (testing::is_planted(testing::Fault::mpi)) code = MPI_ERR_OTHER;
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING + 1] = {};
  int length = 0;  // with Open MPI its end is counted too
  MPI_Error_string(code, text, &length);
  throw Error(std::string("MPI failed in ") + what + ": " + text, ErrorCode::mpi);
}

}  // namespace mykv
