// Names and signatures that other hosts have sent, by the number of the pair. Old pairs are dropped.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>

namespace mykv {

class KnownTexts {
 public:
  // A rank sends a pair again before it has sent so many others.
  static constexpr size_t kRemembered = 1 << 13;

  struct Texts {
    std::string name;
    std::string signature;
  };

  void add(uint64_t number, Texts texts) {
    if (recent_.size() >= 2 * kRemembered) {
      old_ = std::move(recent_);
      recent_.clear();
    }
    recent_[number] = std::move(texts);
  }
  Texts get(uint64_t number) const {
    for (const auto* some : {&recent_, &old_}) {
      const auto found = some->find(number);
      if (found != some->end()) return found->second;
    }
    return {"an operation", "another signature"};
  }

 private:
  std::unordered_map<uint64_t, Texts> recent_;
  std::unordered_map<uint64_t, Texts> old_;
};

}  // namespace mykv
