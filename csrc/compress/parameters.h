// The user's text for a compressor: its name and its parameters. Ranks compare this text.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace mykv::compress {

class Parameters {
 public:
  // `text`: 'name key=value key=value ...'. Throws Error if the text has another form.
  explicit Parameters(const std::string& text);
  const std::string& text() const { return text_; }
  const std::string& name() const { return name_; }

  // Each of these takes a parameter. Throws Error, with the parameter and the value, if the value is not valid.
  double number(const std::string& key, double otherwise);
  int64_t whole(const std::string& key, int64_t otherwise, int64_t least, int64_t most);
  bool flag(const std::string& key, bool otherwise);
  std::string choice(const std::string& key, const std::string& first, const std::string& second);

  // Throws Error if a parameter was given that no compressor code has taken.
  void finish() const;

 private:
  std::optional<std::string> take(const std::string& key);
  [[noreturn]] void refuse(const std::string& key, const std::string& value, const std::string& wanted) const;

  std::string text_;
  std::string name_;
  std::map<std::string, std::string> values_;
};

}  // namespace mykv::compress
