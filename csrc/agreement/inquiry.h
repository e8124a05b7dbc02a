// Asks the other hosts for the state of operations. Each host's first rank answers from its table. Without questions no
// messages are sent.
#pragma once

#include <vector>

#include "agreement/inbox.h"
#include "agreement/messages.h"
#include "agreement/outbox.h"
#include "table/host_table.h"
#include "world/world.h"

namespace mykv {

class Inquiry {
 public:
  Inquiry(const World& world, HostTable& table)
      : world_(world),
        table_(table),
        questions_(world.control(), kQuestionTag),
        answers_(world.control(), kAnswerTag),
        sendings_(world.control()) {}

  // An answer from another host.
  struct Answer : OperationStates {
    int host = 0;
  };
  // Asks all other hosts. Later answers to an earlier question are dropped.
  void ask(const std::vector<Key>& keys);
  // The answers that have arrived since the last call.
  std::vector<Answer> take_answers();
  // Answers a question. Returns whether there was one. Only for the first rank of a host.
  bool answer_one();
  // Continues the sends.
  void progress() { sendings_.progress(); }
  bool sending() const { return !sendings_.empty(); }
  // Whether this host is sending no message, and every message that it has begun to receive is complete.
  bool quiet() const { return !sending() && questions_.quiet() && answers_.quiet(); }

 private:
  static constexpr int kQuestionTag = 2;
  static constexpr int kAnswerTag = 3;

  const World& world_;
  HostTable& table_;
  Inbox questions_;
  Inbox answers_;
  uint64_t question_ = 0;  // number of this rank's last question
  Sendings sendings_;
};

}  // namespace mykv
