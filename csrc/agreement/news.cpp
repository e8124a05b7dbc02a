#include "agreement/news.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/error.h"

namespace mykv {

namespace {

enum : uint8_t { kHasTexts = 1, kHasError = 2, kHasPlacement = 4 };

void put(std::vector<char>* out, const void* data, size_t bytes) {
  const auto* p = static_cast<const char*>(data);
  out->insert(out->end(), p, p + bytes);
}

void put(std::vector<char>* out, const std::string& text) {
  const auto size = static_cast<uint16_t>(std::min<size_t>(text.size(), std::numeric_limits<uint16_t>::max()));
  put(out, &size, sizeof size);
  put(out, text.data(), size);
}

void require(bool right) {
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

News read(Reader& reader) {
  News news;
  const auto type = reader.number<uint8_t>();
  const auto flags = reader.number<uint8_t>();
  require(type >= static_cast<uint8_t>(News::Type::announce) && type <= static_cast<uint8_t>(News::Type::ended));
  require((flags & ~(kHasTexts | kHasError | kHasPlacement)) == 0);
  news.type = static_cast<News::Type>(type);
  news.number = reader.number<uint64_t>();
  if (news.type == News::Type::depart) {
    require(news.number < static_cast<uint64_t>(std::numeric_limits<int>::max()));
  } else {
    news.key.high = reader.number<uint64_t>();
    news.key.low = reader.number<uint64_t>();
  }
  if (news.type == News::Type::announce) news.priority = reader.number<int32_t>();
  news.has_texts = (flags & kHasTexts) != 0;
  if (news.has_texts) {
    news.name = reader.text();
    news.signature = reader.text();
  }
  if ((flags & kHasError) != 0) news.error = reader.text();
  if ((flags & kHasPlacement) != 0) news.placement = reader.number<uint64_t>();
  return news;
}

}  // namespace

void encode(const News& news, std::vector<char>* out) {
  const auto flags = static_cast<uint8_t>((news.has_texts ? kHasTexts : 0) | (news.error.empty() ? 0 : kHasError) |
                                          (news.placement == 0 ? 0 : kHasPlacement));
  put(out, &news.type, sizeof news.type);
  put(out, &flags, sizeof flags);
  put(out, &news.number, sizeof news.number);
  if (news.type != News::Type::depart) {
    put(out, &news.key.high, sizeof news.key.high);
    put(out, &news.key.low, sizeof news.key.low);
  }
  if (news.type == News::Type::announce) put(out, &news.priority, sizeof news.priority);
  if (news.has_texts) {
    put(out, news.name);
    put(out, news.signature);
  }
  if (!news.error.empty()) put(out, news.error);
  if (news.placement != 0) put(out, &news.placement, sizeof news.placement);
}

std::vector<News> decode(const char* data, size_t bytes) {
  std::vector<News> all;
  for (Reader reader(data, bytes); !reader.at_end();) all.push_back(read(reader));
  return all;
}

}  // namespace mykv
