// What a user says of a compressor: its name and its parameters, as the text that ranks compare.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace mykv::compress {

class Parameters {
 public:
  // 'name key=value key=value ...'. Throws Error where it is no such text.
  explicit Parameters(const std::string& text);
  const std::string& text() const { return text_; }
  const std::string& name() const { return name_; }

  // Each throws Error, which names the parameter and the value, where the value is no such thing.
  double number(const std::string& key, double otherwise);
  int64_t whole(const std::string& key, int64_t otherwise, int64_t least, int64_t most);
  bool flag(const std::string& key, bool otherwise);
  std::string choice(const std::string& key, const std::string& first, const std::string& second);

  // Throws Error if a parameter was given that nobody has asked for.
  void finish() const;

 private:
  std::optional<std::string> take(const std::string& key);
  [[noreturn]] void refuse(const std::string& key, const std::string& value, const std::string& wanted) const;

  std::string text_;
  std::string name_;
  std::map<std::string, std::string> values_;
};

}  // namespace mykv::compress
