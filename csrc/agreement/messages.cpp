#include "agreement/messages.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/text.h"

namespace mykv {

namespace {

enum : uint8_t { kHasTexts = 1, kHasError = 2, kHasPlacement = 4, kHasCode = 8, kHasLate = 16, kHasValues = 32 };

void put_text(std::vector<char>* out, const std::string& text) {
  const std::string_view kept = beginning(text, std::numeric_limits<uint16_t>::max());
  const auto size = static_cast<uint16_t>(kept.size());
  put(out, &size, sizeof size);
  put(out, kept.data(), size);
}

// Whether the message has the number of a rank instead of the key of an operation.
bool names_rank(Message::Type type) { return type == Message::Type::depart || type == Message::Type::lost; }

void put_code(std::vector<char>* out, const Failure& failure) {
  const auto ranks =
      static_cast<uint16_t>(std::min<size_t>(failure.ranks.size(), std::numeric_limits<uint16_t>::max()));
  put(out, &failure.code, sizeof failure.code);
  put(out, &ranks, sizeof ranks);
  put(out, failure.ranks.data(), ranks * sizeof(int32_t));
}

void read_code(Reader& reader, Failure* failure) {
  const auto code = reader.number<uint8_t>();
  require(code != static_cast<uint8_t>(ErrorCode::other) && code < std::size(kErrorCodes) && !failure->empty());
  failure->code = static_cast<ErrorCode>(code);
  for (auto left = reader.number<uint16_t>(); left > 0; --left) {
    failure->ranks.push_back(reader.number<int32_t>());
    require(failure->ranks.back() >= 0);
  }
}

Message read(Reader& reader) {
  Message message;
  const auto type = reader.number<uint8_t>();
  const auto flags = reader.number<uint8_t>();
  require(type >= static_cast<uint8_t>(Message::Type::announce) && type <= static_cast<uint8_t>(Message::Type::lost));
  require((flags & ~(kHasTexts | kHasError | kHasPlacement | kHasCode | kHasLate | kHasValues)) == 0);
  message.type = static_cast<Message::Type>(type);
  message.number = reader.number<uint64_t>();
  if (names_rank(message.type)) {
    require(message.number < static_cast<uint64_t>(std::numeric_limits<int>::max()));
  } else {
    message.key.high = reader.number<uint64_t>();
    message.key.low = reader.number<uint64_t>();
  }
  if (message.type == Message::Type::announce) message.priority = reader.number<int32_t>();
  message.has_texts = (flags & kHasTexts) != 0;
  if (message.has_texts) {
    message.name = reader.text();
    message.signature = reader.text();
  }
  if ((flags & kHasError) != 0) message.error.text = reader.text();
  if ((flags & kHasCode) != 0) read_code(reader, &message.error);
  if ((flags & kHasPlacement) != 0) message.placement = reader.number<uint64_t>();
  if ((flags & kHasLate) != 0) {
    message.late_rank = reader.number<int32_t>();
    message.waited_ns = reader.number<int64_t>();
    require(message.late_rank >= 0 && message.waited_ns >= 0 && message.waited_ns <= Message::kMostWaited);
  }
  if ((flags & kHasValues) != 0) {
    message.values = reader.values();
    require(!message.values.empty());
  }
  return message;
}

}  // namespace

void encode(const Message& message, std::vector<char>* out) {
  const bool has_code = !message.error.empty() && message.error.code != ErrorCode::other;
  const auto flags =
      static_cast<uint8_t>((message.has_texts ? kHasTexts : 0) | (message.error.empty() ? 0 : kHasError) |
                           (message.placement == 0 ? 0 : kHasPlacement) | (has_code ? kHasCode : 0) |
                           (message.late_rank < 0 ? 0 : kHasLate) | (message.values.empty() ? 0 : kHasValues));
  put(out, &message.type, sizeof message.type);
  put(out, &flags, sizeof flags);
  put(out, &message.number, sizeof message.number);
  if (!names_rank(message.type)) {
    put(out, &message.key.high, sizeof message.key.high);
    put(out, &message.key.low, sizeof message.key.low);
  }
  if (message.type == Message::Type::announce) put(out, &message.priority, sizeof message.priority);
  if (message.has_texts) {
    put_text(out, message.name);
    put_text(out, message.signature);
  }
  if (!message.error.empty()) put_text(out, message.error.text);
  if (has_code) put_code(out, message.error);
  if (message.placement != 0) put(out, &message.placement, sizeof message.placement);
  if (message.late_rank >= 0) {
    put(out, &message.late_rank, sizeof message.late_rank);
    put(out, &message.waited_ns, sizeof message.waited_ns);
  }
  if (message.values.empty()) return;
  const auto size = static_cast<uint32_t>(message.values.size());
  put(out, &size, sizeof size);
  put(out, message.values.data(), size);
}

std::vector<Message> decode(const char* data, size_t bytes) {
  std::vector<Message> all;
  for (Reader reader(data, bytes); !reader.at_end();) all.push_back(read(reader));
  return all;
}

namespace {

void put_number(std::vector<char>* out, uint64_t number) { put(out, &number, sizeof number); }

}  // namespace

// Encoded as the question's number, then the two halves of each key.
std::vector<char> encode(const Question& question) {
  std::vector<char> bytes;
  put_number(&bytes, question.number);
  for (const Key& key : question.keys) {
    put_number(&bytes, key.high);
    put_number(&bytes, key.low);
  }
  return bytes;
}

Question decode_question(const std::vector<char>& bytes) {
  Reader reader(bytes.data(), bytes.size());
  Question question{reader.number<uint64_t>(), {}};
  while (!reader.at_end()) {
    Key& key = question.keys.emplace_back();
    key.high = reader.number<uint64_t>();
    key.low = reader.number<uint64_t>();
  }
  return question;
}

// Encoded as the question's number, then lists of ranks, each preceded by its length: for each key `missing` and
// `through`, and at the end `unresponsive`.
std::vector<char> encode(const OperationStates& states) {
  std::vector<char> bytes;
  put_number(&bytes, states.question);
  const auto add = [&](const std::vector<int>& ranks) {
    put_number(&bytes, ranks.size());
    for (const int rank : ranks) put_number(&bytes, static_cast<uint64_t>(rank));
  };
  for (size_t k = 0; k < states.missing.size(); ++k) {
    add(states.missing[k]);
    add(states.through[k]);
  }
  add(states.unresponsive);
  return bytes;
}

OperationStates decode_operation_states(const std::vector<char>& bytes, int ranks) {
  Reader reader(bytes.data(), bytes.size());
  OperationStates states;
  states.question = reader.number<uint64_t>();
  std::vector<std::vector<int>> lists;
  while (!reader.at_end()) {
    std::vector<int>& list = lists.emplace_back();
    for (auto left = reader.number<uint64_t>(); left > 0; --left) {
      const auto rank = reader.number<uint64_t>();
      require(rank < static_cast<uint64_t>(ranks));
      list.push_back(static_cast<int>(rank));
    }
  }
  require(lists.size() % 2 == 1);
  states.unresponsive = std::move(lists.back());
  for (size_t k = 0; k + 1 < lists.size(); k += 2) {
    states.missing.push_back(std::move(lists[k]));
    states.through.push_back(std::move(lists[k + 1]));
  }
  return states;
}

}  // namespace mykv
