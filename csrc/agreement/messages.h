// The messages about operations that the hosts' first ranks exchange (agreement.h), and their encoding: several of them
// may share one MPI message. A message from another host is checked before it is used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"
#include "operations/operation.h"

namespace mykv {

// The bytes of messages between hosts. A message from another host is checked while it is read.

inline void put(std::vector<char>* out, const void* data, size_t bytes) {
  const auto* p = static_cast<const char*>(data);
  out->insert(out->end(), p, p + bytes);
}

inline void require(bool right) {
  if (!right) throw Error("mykv received a malformed message from another host (different versions?)");
}

class Reader {
 public:
  Reader(const char* data, size_t bytes) : data_(data), left_(bytes) {}
  bool at_end() const { return left_ == 0; }
  template <class T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }
  std::string text() {
    const auto size = number<uint16_t>();
    return std::string(take(size), size);
  }
  std::vector<char> values() {
    const auto size = number<uint32_t>();
    const char* const begin = take(size);
    return std::vector<char>(begin, begin + size);
  }

 private:
  const char* take(size_t bytes) {
    require(bytes <= left_);
    const char* taken = data_;
    data_ += bytes;
    left_ -= bytes;
    return taken;
  }

  const char* data_;
  size_t left_;
};

struct Message {
  static constexpr int64_t kMostWaited = int64_t{1} << 50;  // 13 days; sums over all hosts fit into 64 bits
  enum class Type : uint8_t {
    announce = 1,
    verdict = 2,
    depart = 3,
    give_up = 4,  // any rank to rank 0
    end = 5,      // rank 0 to all
    ended = 6,    // the answer to `end`, if there was something to end
    lost = 7,     // like depart, of a rank that has broken down and passes on no more messages
  };

  Type type = Type::announce;
  Key key;
  // announce: the number of the texts; verdict: the sequence number; depart and lost: the rank; end: 1 if it is sent
  // again.
  uint64_t number = 0;
  int32_t priority = 0;  // only in announce: the operation's priority
  // Only for operations by NCCL. announce: digest of this host's ranks; verdict: digest of all ranks.
  uint64_t placement = 0;
  // Only in announce, for the statistics of late ranks, about the ranks of this host and of the hosts below it:
  int32_t late_rank = -1;  // the rank that came last; negative: the operation is not counted
  int64_t waited_ns = 0;   // the sum of the times in nanoseconds that the other ranks waited for late_rank
  bool has_texts = false;
  std::string name;
  std::string signature;
  Failure error;
  std::vector<char> values;  // values of a small operation; announce: the sum of the hosts; verdict: the result
};

// Appends the message to `out`; texts of more than 65535 bytes are cut.
void encode(const Message& message, std::vector<char>* out);
// All messages in the bytes. Throws Error if encode() cannot have produced these bytes.
std::vector<Message> decode(const char* data, size_t bytes);

// Questions and answers between hosts about operations (inquiry.h), and their encoding for MPI, as numbers of 64 bits.
// A message from another host is checked before it is used.

struct Question {
  uint64_t number = 0;
  std::vector<Key> keys;
};

// The state of operations on the host that answers.
struct OperationStates {
  uint64_t question = 0;                  // number of the question
  std::vector<std::vector<int>> missing;  // for each key: ranks of the host that have not arrived
  std::vector<std::vector<int>>
      through;  // for each key: ranks that have arrived but do not wait: they refused, or the operation has ended
  std::vector<int> unresponsive;  // ranks of the host without a heartbeat for some seconds
};

std::vector<char> encode(const Question& question);
std::vector<char> encode(const OperationStates& states);
// These throw Error if encode() cannot have produced these bytes in a world of `ranks` ranks.
Question decode_question(const std::vector<char>& bytes);
OperationStates decode_operation_states(const std::vector<char>& bytes, int ranks);

}  // namespace mykv
