#include "runtime/inquiry.h"

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

Inquiry::Numbers Inquiry::receive(int tag, int* from) {
  int there = 0;
  MPI_Message message;
  MPI_Status status;
  check(MPI_Improbe(MPI_ANY_SOURCE, tag, world_.control(), &there, &message, &status), "MPI_Improbe");
  if (!there) return {};
  int count = 0;
  MPI_Get_count(&status, MPI_UINT64_T, &count);
  Numbers numbers(static_cast<size_t>(count));
  check(MPI_Mrecv(numbers.data(), count, MPI_UINT64_T, &message, &status), "MPI_Mrecv");
  *from = status.MPI_SOURCE;
  return numbers;
}

// A question is its number and the two halves of each key.
void Inquiry::ask(const std::vector<Key>& keys) {
  Numbers question{++question_};
  for (const Key& key : keys) question.insert(question.end(), {key.high, key.low});
  for (const std::vector<int>& ranks : world_.hosts()) {
    if (ranks[0] != world_.hosts()[static_cast<size_t>(world_.host())][0]) send(question, ranks[0], kQuestionTag);
  }
}

// An answer is the question's number and lists of ranks, each after its length: one for each key, and the last one.
bool Inquiry::answer_one() {
  progress();
  int asker = 0;
  const Numbers question = receive(kQuestionTag, &asker);
  if (question.empty()) return false;
  const std::vector<int>& ranks = world_.hosts()[static_cast<size_t>(world_.host())];
  Numbers answer{question[0]};
  const auto add = [&](const std::vector<int>& local_ranks) {
    answer.push_back(local_ranks.size());
    for (int r : local_ranks) answer.push_back(static_cast<uint64_t>(ranks[static_cast<size_t>(r)]));
  };
  std::vector<int> all(ranks.size());
  std::iota(all.begin(), all.end(), 0);
  try {
    for (size_t at = 1; at + 1 < question.size(); at += 2) {
      const Standing standing = rendezvous_.standing({question[at], question[at + 1]});
      add(standing.found ? standing.missing : all);
    }
  } catch (const Error&) {
    return true;  // the table is locked; who asks sees that this host does not answer
  }
  add(rendezvous_.unresponsive());
  send(std::move(answer), asker, kAnswerTag);
  return true;
}

std::vector<Inquiry::Answer> Inquiry::take_answers() {
  std::vector<Answer> answers;
  int from = 0;
  for (Numbers numbers = receive(kAnswerTag, &from); !numbers.empty(); numbers = receive(kAnswerTag, &from)) {
    if (numbers[0] != question_) continue;
    Answer answer;
    answer.host = world_.host_of(from);
    for (size_t at = 1; at < numbers.size();) {
      std::vector<int>& ranks = answer.missing.emplace_back();
      const size_t end = std::min<size_t>(at + 1 + numbers[at], numbers.size());
      for (++at; at < end; ++at) ranks.push_back(static_cast<int>(numbers[at]));
    }
    if (answer.missing.empty()) continue;
    answer.unresponsive = std::move(answer.missing.back());
    answer.missing.pop_back();
    answers.push_back(std::move(answer));
  }
  return answers;
}

}  // namespace mykv
