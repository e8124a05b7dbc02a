// How a rank asks the other hosts where operations stand. Each host's first rank answers from its table. Nothing is
// sent while nobody asks.
#pragma once

#include <mpi.h>

#include <list>
#include <vector>

#include "agreement/inbox.h"
#include "agreement/question.h"
#include "table/host_table.h"
#include "world/world.h"

namespace mykv {

class Inquiry {
 public:
  Inquiry(const World& world, HostTable& table)
      : world_(world),
        table_(table),
        questions_(world.control(), kQuestionTag),
        answers_(world.control(), kAnswerTag) {}
  ~Inquiry();

  // What one other host has answered.
  struct Answer : OperationStates {
    int host = 0;
  };
  // Asks all other hosts. A new question makes answers to the last one void.
  void ask(const std::vector<Key>& keys);
  // The answers that have come since the last call.
  std::vector<Answer> take_answers();
  // A host's first rank: answers a question; false when there was none.
  bool answer_one();
  // Sees to messages that are on their way out.
  void progress();
  bool sending() const { return !sending_.empty(); }
  // No message is under way, in either direction.
  bool quiet() const { return !sending() && questions_.quiet() && answers_.quiet(); }

 private:
  static constexpr int kQuestionTag = 2;
  static constexpr int kAnswerTag = 3;

  void send(Numbers numbers, int to, int tag);
  // The next message, and its sender; empty when there is none.
  static Numbers receive(Inbox& inbox, int* from);

  const World& world_;
  HostTable& table_;
  Inbox questions_;
  Inbox answers_;
  uint64_t question_ = 0;  // the last one of this rank
  struct Sending {
    Numbers numbers;
    MPI_Request request;
  };
  std::list<Sending> sending_;
};

}  // namespace mykv
