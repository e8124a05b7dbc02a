#include "agreement/inquiry.h"

#include <cstring>
#include <numeric>

#include "base/error.h"
#include "base/keep_forever.h"
#include "base/mpi_check.h"

namespace mykv {

Inquiry::~Inquiry() {
  // MPI may still read messages that are being sent; their memory is never freed.
  if (!sending_.empty()) keep_for_good(std::move(sending_));
}

void Inquiry::send(Numbers numbers, int to, int tag) {
  sending_.push_back({std::move(numbers), MPI_REQUEST_NULL});
  Sending& s = sending_.back();
  check_mpi(MPI_Isend(s.numbers.data(), static_cast<int>(s.numbers.size() * sizeof(uint64_t)), MPI_BYTE, to, tag,
                      world_.control(), &s.request),
            "MPI_Isend between hosts");
}

void Inquiry::progress() {
  for (auto it = sending_.begin(); it != sending_.end();) {
    int ended = 0;
    check_mpi(MPI_Test(&it->request, &ended, MPI_STATUS_IGNORE), "MPI_Test between hosts");
    it = ended ? sending_.erase(it) : std::next(it);
  }
}

Numbers Inquiry::receive(Inbox& inbox, int* from) {
  std::vector<char> bytes;
  if (!inbox.take(&bytes, from)) return {};
  Numbers numbers(bytes.size() / sizeof(uint64_t));
  if (numbers.size() * sizeof(uint64_t) != bytes.size())
    throw Error("mykv received a malformed message from another host (different versions?)");
  if (!bytes.empty()) std::memcpy(numbers.data(), bytes.data(), bytes.size());
  return numbers;
}

void Inquiry::ask(const std::vector<Key>& keys) {
  const Numbers question = encode(Question{++question_, keys});
  for (const std::vector<int>& ranks : world_.hosts()) {
    if (ranks[0] != world_.hosts()[static_cast<size_t>(world_.host())][0]) send(question, ranks[0], kQuestionTag);
  }
}

bool Inquiry::answer_one() {
  progress();
  int asker = 0;
  const Numbers numbers = receive(questions_, &asker);
  if (numbers.empty()) return false;
  const Question question = decode_question(numbers);
  const std::vector<int>& ranks = world_.hosts()[static_cast<size_t>(world_.host())];
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
    return true;  // the table is locked; the asking rank sees that this host does not answer
  }
  answer.unresponsive = named(table_.unresponsive());
  send(encode(answer), asker, kAnswerTag);
  return true;
}

std::vector<Inquiry::Answer> Inquiry::take_answers() {
  std::vector<Answer> answers;
  int from = 0;
  for (Numbers numbers = receive(answers_, &from); !numbers.empty(); numbers = receive(answers_, &from)) {
    Answer answer;
    static_cast<OperationStates&>(answer) = decode_operation_states(numbers, world_.size());
    if (answer.question != question_) continue;
    answer.host = world_.host_of(from);
    answers.push_back(std::move(answer));
  }
  return answers;
}

}  // namespace mykv
