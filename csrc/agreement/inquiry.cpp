#include "agreement/inquiry.h"

#include <memory>
#include <numeric>

#include "base/error.h"

namespace mykv {

void Inquiry::ask(const std::vector<Key>& keys) {
  const auto question = std::make_shared<const std::vector<char>>(encode(Question{++question_, keys}));
  for (const std::vector<int>& ranks : world_.hosts()) {
    if (ranks[0] != world_.host_ranks()[0]) sendings_.send(question, ranks[0], kQuestionTag);
  }
}

bool Inquiry::answer_one() {
  progress();
  int asker = 0;
  std::vector<char> bytes;
  if (!questions_.take(&bytes, &asker)) return false;
  const Question question = decode_question(bytes);
  const std::vector<int>& ranks = world_.host_ranks();
  OperationStates answer;
  answer.question = question.number;
  const auto named = [&](std::vector<int> local_ranks) {
    for (int& r : local_ranks) r = ranks[static_cast<size_t>(r)];
    return local_ranks;
  };
  std::vector<int> all(ranks.size());
  std::iota(all.begin(), all.end(), 0);
  try {
    for (const Key& key : question.keys) {
      const OperationState operation_state = table_.operation_state(key);
      answer.missing.push_back(named(operation_state.found ? operation_state.missing : all));
      answer.through.push_back(named(operation_state.through));
    }
  } catch (const Error&) {
    return true;  // the table is locked; the asking rank notices that this host does not answer
  }
  answer.unresponsive = named(table_.unresponsive());
  sendings_.send(std::make_shared<const std::vector<char>>(encode(answer)), asker, kAnswerTag);
  return true;
}

std::vector<Inquiry::Answer> Inquiry::take_answers() {
  std::vector<Answer> answers;
  std::vector<char> bytes;
  int from = 0;
  while (answers_.take(&bytes, &from)) {
    Answer answer;
    static_cast<OperationStates&>(answer) = decode_operation_states(bytes, world_.size());
    if (answer.question != question_) continue;
    answer.host = world_.host_of(from);
    answers.push_back(std::move(answer));
  }
  return answers;
}

}  // namespace mykv
