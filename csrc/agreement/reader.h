// The bytes of messages between hosts. A message from another host is checked while it is read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"

namespace mykv {

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

}  // namespace mykv
