#include "base/text.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace mykv {

namespace {

constexpr size_t kLongestCharacter = 4;

bool continues(char byte) { return (static_cast<uint8_t>(byte) & 0xC0) == 0x80; }

// Length of the first character in bytes; 0: no valid character.
size_t character(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t first = byte(0);
  if (first < 0x80) return 1;
  const size_t size = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4 || text.size() < size) return 0;
  for (size_t i = 1; i < size; ++i) {
    if (!continues(text[i])) return 0;
  }
  // Overlong forms, surrogates, and numbers beyond Unicode.
  if ((first == 0xE0 && byte(1) < 0xA0) || (first == 0xED && byte(1) > 0x9F)) return 0;
  if ((first == 0xF0 && byte(1) < 0x90) || (first == 0xF4 && byte(1) > 0x8F)) return 0;
  return size;
}

}  // namespace

std::string_view beginning(std::string_view text, size_t most) {
  if (text.size() <= most) return text;
  size_t end = most;
  while (end > 0 && most - end < kLongestCharacter && continues(text[end])) --end;
  return text.substr(0, end);
}

void set_text(char* to, size_t capacity, std::string_view text) {
  const std::string_view kept = beginning(text, capacity - 1);
  std::memcpy(to, kept.data(), kept.size());
  to[kept.size()] = '\0';
}

std::string readable(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    const size_t size = character(text);
    if (size > 0) {
      result += text.substr(0, size);
    } else {
      result += "\xEF\xBF\xBD";
    }
    text.remove_prefix(std::max<size_t>(size, 1));
  }
  return result;
}

}  // namespace mykv
