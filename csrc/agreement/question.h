// What hosts ask and answer about operations (inquiry.h), and how it lies in a message: whole numbers. What comes from
// another host is checked before anything is done with it.
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

// Where operations stand on the host that answers.
struct OperationStates {
  uint64_t question = 0;                  // its number
  std::vector<std::vector<int>> missing;  // for each key: ranks of the host that have not arrived ...
  std::vector<std::vector<int>>
      through;                    // ... and those that have, but do not wait: they have refused, or it has ended
  std::vector<int> unresponsive;  // its ranks whose threads have not been seen for a while
};

Numbers encode(const Question& question);
Numbers encode(const OperationStates& standings);
// Throw Error where these numbers are none that encode() makes among so many ranks.
Question decode_question(const Numbers& numbers);
OperationStates decode_operation_states(const Numbers& numbers, int ranks);

}  // namespace mykv
