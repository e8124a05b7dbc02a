#include "agreement/question.h"

#include "base/error.h"

namespace mykv {

namespace {

void require_well_formed(bool right) {
  if (!right) throw Error("mykv received a malformed question or answer from another host (different versions?)");
}

}  // namespace

// Encoded as the question's number, then the two halves of each key.
Numbers encode(const Question& question) {
  Numbers numbers{question.number};
  for (const Key& key : question.keys) numbers.insert(numbers.end(), {key.high, key.low});
  return numbers;
}

Question decode_question(const Numbers& numbers) {
  require_well_formed(numbers.size() % 2 == 1);
  Question question{numbers[0], {}};
  for (size_t at = 1; at < numbers.size(); at += 2) question.keys.push_back({numbers[at], numbers[at + 1]});
  return question;
}

// Encoded as the question's number, then lists of ranks, each after its length: two for each key, one at the end.
Numbers encode(const OperationStates& standings) {
  Numbers numbers{standings.question};
  const auto add = [&](const std::vector<int>& ranks) {
    numbers.push_back(ranks.size());
    for (int rank : ranks) numbers.push_back(static_cast<uint64_t>(rank));
  };
  for (size_t k = 0; k < standings.missing.size(); ++k) {
    add(standings.missing[k]);
    add(standings.through[k]);
  }
  add(standings.unresponsive);
  return numbers;
}

OperationStates decode_operation_states(const Numbers& numbers, int ranks) {
  require_well_formed(numbers.size() >= 2);
  OperationStates standings;
  standings.question = numbers[0];
  std::vector<std::vector<int>> lists;
  for (size_t at = 1; at < numbers.size();) {
    const uint64_t length = numbers[at++];
    require_well_formed(length <= numbers.size() - at);
    std::vector<int>& list = lists.emplace_back();
    for (const size_t end = at + length; at < end; ++at) {
      require_well_formed(numbers[at] < static_cast<uint64_t>(ranks));
      list.push_back(static_cast<int>(numbers[at]));
    }
  }
  require_well_formed(lists.size() % 2 == 1);
  standings.unresponsive = std::move(lists.back());
  for (size_t k = 0; k + 1 < lists.size(); k += 2) {
    standings.missing.push_back(std::move(lists[k]));
    standings.through.push_back(std::move(lists[k + 1]));
  }
  return standings;
}

}  // namespace mykv
