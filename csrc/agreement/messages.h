// The messages of the hosts' first ranks about operations (agreement.h), and their encoding for MPI: several messages
// behind each other. A message from another host is checked before it is used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "operations/operation.h"

namespace mykv {

struct Message {
  static constexpr int64_t kMostWaited = int64_t{1} << 50;  // 13 days; sums over all hosts fit
  enum class Type : uint8_t {
    announce = 1,
    verdict = 2,
    depart = 3,
    give_up = 4,  // any rank to rank 0
    end = 5,      // rank 0 to all
    ended = 6,    // the answer to `end`, if there was something to end
    lost = 7,     // as depart, of a rank that has broken down: it passes no more messages on
  };

  Type type = Type::announce;
  Key key;
  // announce: number of the texts; verdict: the sequence number; depart and lost: the rank; end: 1 if told again.
  uint64_t number = 0;
  int32_t priority = 0;    // announce
  uint64_t placement = 0;  // by NCCL: announce: of this host's ranks; verdict: of all
  // announce, for the statistics: the rank of this host that came last, and the time that all ranks of the host have
  // waited for it, in nanoseconds; late_rank < 0: the operation is not counted.
  int32_t late_rank = -1;
  int64_t waited_ns = 0;
  bool has_texts = false;
  std::string name;
  std::string signature;
  Cause error;
  std::vector<char> values;  // of a small operation: announce: the sum of the hosts; verdict: the result
};

// Appends the message to `out`; texts of more than 65535 bytes are cut.
void encode(const Message& message, std::vector<char>* out);
// All messages in the bytes. Throws Error if encode() cannot have made these bytes.
std::vector<Message> decode(const char* data, size_t bytes);

}  // namespace mykv
