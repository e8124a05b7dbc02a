#include "compress/parameters.h"

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <locale>
#include <sstream>

#include "base/error.h"

namespace mykv::compress {

Parameters::Parameters(const std::string& text) : text_(text) {
  std::istringstream words(text);
  words >> name_;
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    const bool is_new = equals != std::string::npos && equals > 0 &&
                        values_.emplace(word.substr(0, equals), word.substr(equals + 1)).second;
    if (!is_new) throw Error("the compressor '" + text + "' has a parameter that cannot be read: '" + word + "'");
  }
  if (name_.empty()) throw Error("a compressor needs a name");
}

std::optional<std::string> Parameters::take(const std::string& key) {
  const auto found = values_.find(key);
  if (found == values_.end()) return std::nullopt;
  std::string value = found->second;
  values_.erase(found);
  return value;
}

void Parameters::refuse(const std::string& key, const std::string& value, const std::string& wanted) const {
  throw Error("the parameter " + key + " of the compressor '" + name_ + "' must be " + wanted + ", not " + value);
}

double Parameters::number(const std::string& key, double otherwise) {
  const std::optional<std::string> value = take(key);
  if (!value) return otherwise;
  std::istringstream text(*value);
  text.imbue(std::locale::classic());  // the program's locale may have another decimal point
  double number = 0;
  if (!(text >> number) || text.peek() != EOF || !std::isfinite(number)) refuse(key, *value, "a number");
  return number;
}

int64_t Parameters::whole(const std::string& key, int64_t otherwise, int64_t least, int64_t most) {
  const std::optional<std::string> value = take(key);
  if (!value) return otherwise;
  char* end = nullptr;
  errno = 0;
  const long long number = std::strtoll(value->c_str(), &end, 10);
  if (end == value->c_str() || *end != '\0' || errno != 0 || number < least || number > most) {
    refuse(key, *value, "a whole number from " + std::to_string(least) + " to " + std::to_string(most));
  }
  return number;
}

bool Parameters::flag(const std::string& key, bool otherwise) {
  const std::optional<std::string> value = take(key);
  if (!value) return otherwise;
  if (*value != "True" && *value != "False") refuse(key, *value, "True or False");
  return *value == "True";
}

std::string Parameters::choice(const std::string& key, const std::string& first, const std::string& second) {
  const std::string value = take(key).value_or(first);
  if (value != first && value != second) refuse(key, value, first + " or " + second);
  return value;
}

void Parameters::finish() const {
  if (values_.empty()) return;
  throw Error("the compressor '" + name_ + "' has no parameter " + values_.begin()->first);
}

}  // namespace mykv::compress
