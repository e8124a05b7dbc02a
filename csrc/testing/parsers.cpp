#include "testing/parsers.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

#include "agreement/messages.h"
#include "base/error.h"
#include "compress/compressor.h"
#include "world/door.h"

namespace mykv::testing {

namespace {

void require(bool right, const char* what) {
  if (!right) throw std::logic_error(what);
}

// Takes numbers from the beginning of the bytes; zeros when they are used up.
class Source {
 public:
  Source(const uint8_t* data, size_t bytes) : data_(data), left_(bytes) {}
  template <class T>
  T number() {
    T value{};
    const size_t some = std::min(left_, sizeof value);
    if (some > 0) std::memcpy(&value, data_, some);
    data_ += some;
    left_ -= some;
    return value;
  }
  const uint8_t* data() const { return data_; }
  size_t left() const { return left_; }

 private:
  const uint8_t* data_;
  size_t left_;
};

// Memory of exactly this size in bytes, aligned like the transport's memory, so that a sanitizer detects an access to
// the first byte behind it.
std::unique_ptr<char, decltype(&std::free)> exactly(size_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, std::max<size_t>(bytes, 1)) != 0) throw std::bad_alloc();
  return {static_cast<char*>(memory), &std::free};
}

void parse_news(const uint8_t* data, size_t bytes) {
  const std::vector<Message> all = decode(reinterpret_cast<const char*>(data), bytes);
  std::vector<char> written;
  for (const Message& message : all) encode(message, &written);
  const std::vector<Message> again = decode(written.data(), written.size());
  require(again.size() == all.size(), "messages change their number");
  for (size_t i = 0; i < all.size(); ++i) {
    require(all[i].type == again[i].type && all[i].key == again[i].key && all[i].number == again[i].number &&
                all[i].priority == again[i].priority && all[i].has_texts == again[i].has_texts &&
                all[i].name == again[i].name && all[i].signature == again[i].signature &&
                all[i].error == again[i].error && all[i].values == again[i].values &&
                all[i].late_rank == again[i].late_rank && all[i].waited_ns == again[i].waited_ns,
            "messages change on their way");
  }
}

void parse_question(const uint8_t* data, size_t bytes) {
  const std::vector<char> given(data, data + bytes);
  require(encode(decode_question(given)) == given, "a question changes on its way");
}

void parse_answer(const uint8_t* data, size_t bytes) {
  constexpr int kRanks = 7;
  const std::vector<char> given(data, data + bytes);
  const OperationStates states = decode_operation_states(given, kRanks);
  require(encode(states) == given, "an answer changes on its way");
  for (const auto* const lists : {&states.missing, &states.through}) {
    for (const std::vector<int>& ranks : *lists) {
      for (int rank : ranks) require(rank >= 0 && rank < kRanks, "an answer names a rank that does not exist");
    }
  }
}

template <class T>
void encode_and_decode(const compress::Compressor& compressor, const compress::Piece& piece, Source& source) {
  const auto values = exactly(piece.count * sizeof(T));
  const auto residual = exactly(piece.count * sizeof(T));
  std::memset(residual.get(), 0, piece.count * sizeof(T));
  for (size_t i = 0; i < piece.count; ++i) {
    const T value = source.number<T>();
    std::memcpy(values.get() + i * sizeof(T), &value, sizeof value);
  }
  const size_t bytes = compressor.bytes(piece);
  const auto message = exactly(bytes);
  compress::Input input;
  input.values = values.get();
  input.residual = residual.get();
  compressor.encode(piece, input, message.get());
  compressor.decode(piece, message.get(), values.get());
}

// A text that names a compressor, a line feed, and values for it.
void parse_compressor(const uint8_t* data, size_t bytes) {
  const uint8_t* const end = std::find(data, data + bytes, '\n');
  const auto compressor =
      compress::make_compressor(std::string(reinterpret_cast<const char*>(data), static_cast<size_t>(end - data)));
  Source source(end, static_cast<size_t>(data + bytes - end));
  source.number<char>();
  const bool is_double = (source.number<uint8_t>() & 1) != 0;
  const size_t count = source.number<uint16_t>() % 1500;
  const compress::Piece piece{is_double ? DType::float64 : DType::float32, count, count + source.number<uint16_t>()};
  if (is_double) {
    encode_and_decode<double>(*compressor, piece, source);
  } else {
    encode_and_decode<float>(*compressor, piece, source);
  }
}

// A compressed message as another host might send it, for a piece and a compressor known here. If the first bit is set,
// the header is valid, so that the payload is read.
void parse_compressed(const uint8_t* data, size_t bytes) {
  static const char* const kTexts[] = {
      "2bit",
      "1bit",
      "onebit",
      "onebit scaling=False",
      "topk k=0.01",
      "topk k=0.5",
      "topk k=7",
      "randomk k=3",
      "randomk k=0.9",
      "dithering k=1",
      "dithering",
      "dithering k=7",
      "dithering k=32767",
      "dithering partition=natural k=32",
      "dithering k=100",
  };
  Source source(data, bytes);
  const auto choice = source.number<uint8_t>();
  const bool right_header = (choice & 1) != 0;
  const DType dtype = (choice & 2) != 0 ? DType::float64 : DType::float32;
  const std::string text = kTexts[(choice >> 2) % std::size(kTexts)];
  const auto& compressor = compress::compressor_of(text);
  size_t count = source.number<uint16_t>();
  count = count < 65000 ? count % 1500 : 65536 - 8 + count % 16;  // near the size from which indices are longer
  const compress::Piece piece{dtype, count, count + source.number<uint8_t>() * size_t{1000}};
  const size_t size = compressor.bytes(piece);
  const auto message = exactly(size);
  // The given bytes, repeated.
  size_t filled = std::min(size, source.left());
  if (filled > 0) std::memcpy(message.get(), source.data(), filled);
  if (filled == 0) std::memset(message.get(), 0, size);
  for (size_t some = 0; filled > 0 && filled < size; filled += some) {
    some = std::min(filled, size - filled);
    std::memcpy(message.get() + filled, message.get(), some);
  }
  if (right_header && size > 0) {
    const auto elements = static_cast<uint32_t>(count);
    const uint32_t is_finite = 1;
    std::memcpy(message.get(), &elements, sizeof elements);
    std::memcpy(message.get() + sizeof elements, &is_finite, sizeof is_finite);
  }
  const auto values = exactly(count * item_size(dtype));
  compressor.decode(piece, message.get(), values.get());
}

// The bytes that a caller sends to the door of a host's segment, in two pieces.
void parse_call(const uint8_t* data, size_t bytes) {
  struct Host {
    Token name = random_token();
    Token secret{{'s', 'e', 'c', 'r', 'e', 't', 0, 1, 2, 3, 4, 5, 6, 7, 8, 9}};
    Door door;
    Host() {
      std::string refused;
      if (!door.open(name, &refused)) throw std::runtime_error(refused);
    }
  };
  static Host& host = *new Host;
  const int served = host.door.served(), rejected = host.door.rejected_callers();
  const size_t first = bytes > 0 ? data[bytes - 1] % (bytes + 1) : 0;
  const bool known = bytes >= sizeof(Token) && std::memcmp(data, &host.secret, sizeof(Token)) == 0;
  {
    const FileDescriptor caller = knock(host.name);
    require(static_cast<bool>(caller), "nobody can call");
    for (const auto& [from, to] : {std::pair{size_t{0}, first}, {first, bytes}}) {
      if (to > from) send(caller.get(), data + from, to - from, MSG_NOSIGNAL);
      for (int i = 0; i < 2; ++i) host.door.attend(host.secret, STDERR_FILENO, 0);
    }
    pollfd answered{caller.get(), POLLIN, 0};
    const bool handed = poll(&answered, 1, 0) == 1 && static_cast<bool>(receive_descriptor(caller.get()));
    require(handed == known, known ? "a rank gets nothing" : "a stranger gets a descriptor");
  }
  host.door.attend(host.secret, STDERR_FILENO, 0);
  require(host.door.served() - served == (known ? 1 : 0), "callers are miscounted");
  require(host.door.rejected_callers() - rejected == (known ? 0 : 1), "rejected callers are miscounted");
}

template <Parser parser>
void refusing(const uint8_t* data, size_t bytes) {
  try {
    parser(data, bytes);
  } catch (const Error&) {
    // Rejected, as it should be.
  }
}

}  // namespace

const std::map<std::string, Parser>& parsers() {
  static const std::map<std::string, Parser> all{
      {"news", refusing<parse_news>},
      {"question", refusing<parse_question>},
      {"answer", refusing<parse_answer>},
      {"compressor", refusing<parse_compressor>},
      {"compressed", refusing<parse_compressed>},
      {"call", refusing<parse_call>},
  };
  return all;
}

}  // namespace mykv::testing
