// Questions and answers between hosts about operations (inquiry.h), and their encoding as whole numbers. A message from
// another host is checked before it is used.
#pragma once

#include <cstdint>
#include <vector>

#include "operations/operation.h"

namespace mykv {

using Numbers = std::vector<uint64_t>;

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

Numbers encode(const Question& question);
Numbers encode(const OperationStates& standings);
// Throw Error if encode() cannot have made these numbers, in a world of `ranks` ranks.
Question decode_question(const Numbers& numbers);
OperationStates decode_operation_states(const Numbers& numbers, int ranks);

}  // namespace mykv
