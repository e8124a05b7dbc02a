#include "runtime/inquiry.h"

#include <algorithm>
#include <numeric>

#include "runtime/error.h"

namespace mykv {

namespace {

void check(int code, const char* what) {
  if (code != MPI_SUCCESS) throw Error(std::string("MPI failed in ") + what + " between hosts");
}

}  // namespace

void Inquiry::send(Numbers numbers, int to, int tag) {
  sending_.push_back({std::move(numbers), MPI_REQUEST_NULL});
  Sending& s = sending_.back();
  check(MPI_Isend(s.numbers.data(), static_cast<int>(s.numbers.size()), MPI_UINT64_T, to, tag, world_.control(),
                  &s.request),
        "MPI_Isend");
}

void Inquiry::progress() {
  for (auto it = sending_.begin(); it != sending_.end();) {
    int ended = 0;
    check(MPI_Test(&it->request, &ended, MPI_STATUS_IGNORE), "MPI_Test");
    it = ended ? sending_.erase(it) : std::next(it);
  }
}

Numbers Inquiry::receive(int tag, int* from) {
  int there = 0;
  MPI_Message message;
  MPI_Status status;
  check(MPI_Improbe(MPI_ANY_SOURCE, tag, world_.control(), &there, &message, &status), "MPI_Improbe");
  if (!there) return {};
  int count = 0;
  MPI_Get_count(&status, MPI_UINT64_T, &count);
  Numbers numbers(static_cast<size_t>(std::max(count, 0)));  // MPI_UNDEFINED, of no whole numbers, is negative
  check(MPI_Mrecv(numbers.data(), count, MPI_UINT64_T, &message, &status), "MPI_Mrecv");
  *from = status.MPI_SOURCE;
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
  const Numbers numbers = receive(kQuestionTag, &asker);
  if (numbers.empty()) return false;
  const Question question = decode_question(numbers);
  const std::vector<int>& ranks = world_.hosts()[static_cast<size_t>(world_.host())];
  Standings answer;
  answer.question = question.number;
  const auto named = [&](std::vector<int> local_ranks) {
    for (int& r : local_ranks) r = ranks[static_cast<size_t>(r)];
    return local_ranks;
  };
  std::vector<int> all(ranks.size());
  std::iota(all.begin(), all.end(), 0);
  try {
    for (const Key& key : question.keys) {
      const Standing standing = rendezvous_.standing(key);
      answer.missing.push_back(named(standing.found ? standing.missing : all));
    }
  } catch (const Error&) {
    return true;  // the table is locked; who asks sees that this host does not answer
  }
  answer.unresponsive = named(rendezvous_.unresponsive());
  send(encode(answer), asker, kAnswerTag);
  return true;
}

std::vector<Inquiry::Answer> Inquiry::take_answers() {
  std::vector<Answer> answers;
  int from = 0;
  for (Numbers numbers = receive(kAnswerTag, &from); !numbers.empty(); numbers = receive(kAnswerTag, &from)) {
    Answer answer;
    static_cast<Standings&>(answer) = decode_standings(numbers, world_.size());
    if (answer.question != question_) continue;
    answer.host = world_.host_of(from);
    answers.push_back(std::move(answer));
  }
  return answers;
}

}  // namespace mykv
