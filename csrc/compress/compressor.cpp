#include "compress/compressor.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <locale>
#include <map>
#include <mutex>
#include <sstream>
#include <vector>

#include "base/error.h"
#include "base/forks.h"
#include "compress/compress_path.h"
#include "kernels/kernels.h"

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

namespace {

// The beginning of each message.
struct Header {
  uint32_t count;      // number of elements, to detect foreign messages
  uint32_t is_finite;  // 0: all elements count as NaN
  double number;       // the unit of the payload, if the compressor needs it
};
static_assert(sizeof(Header) == 16);

// Reusable memory of this thread.
template <class T, int which>
T* scratch(size_t count) {
  static thread_local std::vector<T> memory;
  if (memory.size() < count) memory.resize(count);
  return memory.data();
}

}  // namespace

size_t Compressor::bytes(const Piece& piece) const {
  return piece.count == 0 ? 0 : sizeof(Header) + payload_bytes(piece);
}

void Compressor::encode(const Piece& piece, const Input& input, char* message) const {
  if (piece.count == 0) return;
  const DefaultFloatMode mode;
  if (piece.dtype == DType::float64) {
    encode_as<double>(piece, input, message);
  } else {
    encode_as<float>(piece, input, message);
  }
}

template <class T>
void Compressor::encode_as(const Piece& piece, const Input& input, char* message) const {
  const Loops<T>& loop = loops<T>();
  T* const corrected = scratch<T, 0>(piece.count);
  T* const residual = feedback_ ? static_cast<T*>(input.residual) : nullptr;
  Header header{static_cast<uint32_t>(piece.count), 0, 0};
  char* const payload = message + sizeof header;
  if (loop.correct(corrected, static_cast<const T*>(input.values), residual, piece.count)) {
    header.number = encode_payload(piece, corrected, input, payload);
    header.is_finite = std::isfinite(header.number) ? 1 : 0;  // a norm may exceed the range of double
  }
  if (header.is_finite == 0) {
    header.number = 0;
    std::memset(payload, 0, payload_bytes(piece));
  }
  std::memcpy(message, &header, sizeof header);
  if (residual == nullptr || header.is_finite == 0) return;
  T* const sent = scratch<T, 1>(piece.count);
  decode_payload(piece, header.number, payload, sent);
  loop.subtract(residual, corrected, sent, piece.count);
}

void Compressor::decode(const Piece& piece, const char* message, void* values) const {
  if (piece.count == 0) return;
  const DefaultFloatMode mode;
  if (piece.dtype == DType::float64) {
    decode_as(piece, message, static_cast<double*>(values));
  } else {
    decode_as(piece, message, static_cast<float*>(values));
  }
}

template <class T>
void Compressor::decode_as(const Piece& piece, const char* message, T* values) const {
  Header header;
  std::memcpy(&header, message, sizeof header);
  if (header.count != static_cast<uint32_t>(piece.count) || header.is_finite > 1 || !std::isfinite(header.number)) {
    throw Error("a compressed message between hosts is damaged: its header is wrong (" + std::to_string(header.count) +
                " elements, expected " + std::to_string(piece.count) + ")");
  }
  if (header.is_finite != 0) {
    decode_payload(piece, header.number, message + sizeof header, values);
  } else {
    std::fill_n(values, piece.count, std::numeric_limits<T>::quiet_NaN());
  }
}

namespace {

struct Factory {
  const char* name;
  std::shared_ptr<const Compressor> (*make)(Parameters&);
};

constexpr Factory kFactories[] = {
    {"2bit", make_2bit}, {"1bit", make_1bit},       {"onebit", make_onebit},
    {"topk", make_topk}, {"randomk", make_randomk}, {"dithering", make_dithering},
};

struct Made {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<const Compressor>> by_text;
};

}  // namespace

std::shared_ptr<const Compressor> make_compressor(const std::string& text) {
  Parameters parameters(text);
  for (const Factory& factory : kFactories) {
    if (parameters.name() != factory.name) continue;
    std::shared_ptr<const Compressor> made = factory.make(parameters);
    parameters.finish();
    return made;
  }
  throw Error("there is no compressor '" + parameters.name() + "'");
}

const Compressor& compressor_of(const std::string& text) {
  auto& made = usable_in_forks<Made>();
  std::lock_guard<std::mutex> lock(made.mutex);
  std::shared_ptr<const Compressor>& compressor = made.by_text[text];
  if (!compressor) compressor = make_compressor(text);
  return *compressor;
}

const CompressPath& compress_path() {
  for (const CompressPath* path : {avx512_loops(), avx2_loops()}) {
    if (path != nullptr && std::strcmp(path->name, kernel_path()) == 0) return *path;
  }
  return *generic_loops();
}

template <>
const Loops<float>& loops<float>() {
  return compress_path().floats;
}

template <>
const Loops<double>& loops<double>() {
  return compress_path().doubles;
}

}  // namespace mykv::compress
