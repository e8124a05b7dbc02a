#include "compress/compressor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/error.h"
#include "compress/compress_path.h"
#include "kernels/kernels.h"

namespace mykv::compress {

namespace {

// Begins each message.
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
    throw Error("a compressed message between hosts is damaged: it says " + std::to_string(header.count) +
                " elements, of " + std::to_string(piece.count));
  }
  if (header.is_finite != 0) {
    decode_payload(piece, header.number, message + sizeof header, values);
  } else {
    std::fill_n(values, piece.count, std::numeric_limits<T>::quiet_NaN());
  }
}

}  // namespace mykv::compress
