// What the hosts' first ranks tell each other about operations (agreement.h), and how it goes by MPI: several messages,
// one behind the other. What comes from another host is checked before anything is done with it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "operations/operation.h"

namespace mykv {

struct Message {
  enum class Type : uint8_t {
    announce = 1,
    verdict = 2,
    depart = 3,
    give_up = 4,  // any rank to rank 0
    end = 5,      // rank 0 to all
    ended = 6,    // and back, where there was something to end
  };

  Type type = Type::announce;
  Key key;
  uint64_t number = 0;     // announce: stands for the texts; verdict: the sequence number; depart: the rank
  int32_t priority = 0;    // announce
  uint64_t placement = 0;  // by NCCL: announce: of this host's ranks; verdict: of all
  bool has_texts = false;
  std::string name;
  std::string signature;
  std::string error;
};

// Puts it behind what is in `out`; texts of more than 65535 bytes are cut.
void encode(const Message& message, std::vector<char>* out);
// All that came at once. Throws Error where these bytes are none that encode() makes.
std::vector<Message> decode(const char* data, size_t bytes);

}  // namespace mykv
