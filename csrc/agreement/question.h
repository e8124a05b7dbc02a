// Questions and answers between hosts about operations (inquiry.h), and their encoding for MPI, as numbers of 64 bits.
// A message from another host is checked before it is used.
#pragma once

#include <cstdint>
#include <vector>

#include "operations/operation.h"

namespace mykv {

struct Question {
  uint64_t number = 0;
  std::vector<Key> keys;
};

// The state of operations on the host that answers.
struct OperationStates {
  uint64_t question = 0;                  // number of the question
  std::vector<std::vector<int>> missing;  // for each key: ranks of the host that have not arrived ...
  std::vector<std::vector<int>>
      through;                    // ... and ranks that have arrived but do not wait: they have refused, or it has ended
  std::vector<int> unresponsive;  // ranks of the host without a heartbeat for some seconds
};

std::vector<char> encode(const Question& question);
std::vector<char> encode(const OperationStates& states);
// Throw Error if encode() cannot have made these bytes, in a world of `ranks` ranks.
Question decode_question(const std::vector<char>& bytes);
OperationStates decode_operation_states(const std::vector<char>& bytes, int ranks);

}  // namespace mykv
