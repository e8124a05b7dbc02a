#include "agreement/question.h"

#include <utility>

#include "agreement/reader.h"

namespace mykv {

namespace {

void put_number(std::vector<char>* out, uint64_t number) { put(out, &number, sizeof number); }

}  // namespace

// Encoded as the question's number, then the two halves of each key.
std::vector<char> encode(const Question& question) {
  std::vector<char> bytes;
  put_number(&bytes, question.number);
  for (const Key& key : question.keys) {
    put_number(&bytes, key.high);
    put_number(&bytes, key.low);
  }
  return bytes;
}

Question decode_question(const std::vector<char>& bytes) {
  Reader reader(bytes.data(), bytes.size());
  Question question{reader.number<uint64_t>(), {}};
  while (!reader.at_end()) {
    Key& key = question.keys.emplace_back();
    key.high = reader.number<uint64_t>();
    key.low = reader.number<uint64_t>();
  }
  return question;
}

// Encoded as the question's number, then lists of ranks, each after its length: two for each key, one at the end.
std::vector<char> encode(const OperationStates& states) {
  std::vector<char> bytes;
  put_number(&bytes, states.question);
  const auto add = [&](const std::vector<int>& ranks) {
    put_number(&bytes, ranks.size());
    for (const int rank : ranks) put_number(&bytes, static_cast<uint64_t>(rank));
  };
  for (size_t k = 0; k < states.missing.size(); ++k) {
    add(states.missing[k]);
    add(states.through[k]);
  }
  add(states.unresponsive);
  return bytes;
}

OperationStates decode_operation_states(const std::vector<char>& bytes, int ranks) {
  Reader reader(bytes.data(), bytes.size());
  OperationStates states;
  states.question = reader.number<uint64_t>();
  std::vector<std::vector<int>> lists;
  while (!reader.at_end()) {
    std::vector<int>& list = lists.emplace_back();
    for (auto left = reader.number<uint64_t>(); left > 0; --left) {
      const auto rank = reader.number<uint64_t>();
      require(rank < static_cast<uint64_t>(ranks));
      list.push_back(static_cast<int>(rank));
    }
  }
  require(lists.size() % 2 == 1);
  states.unresponsive = std::move(lists.back());
  for (size_t k = 0; k + 1 < lists.size(); k += 2) {
    states.missing.push_back(std::move(lists[k]));
    states.through.push_back(std::move(lists[k + 1]));
  }
  return states;
}

}  // namespace mykv
