#include "compress/sparse.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/error.h"

namespace mykv::compress {

namespace {

constexpr size_t kShortIndices = size_t{1} << 16;  // elements of a piece whose indices have two bytes

template <class Index, class T>
void write_as(const T* values, const uint32_t* indices, size_t kept, T factor, char* payload) {
  char* const numbers = payload + kept * sizeof(T);
  for (size_t i = 0; i < kept; ++i) {
    const T value = values[indices[i]] * factor;
    const auto index = static_cast<Index>(indices[i]);
    std::memcpy(payload + i * sizeof value, &value, sizeof value);
    std::memcpy(numbers + i * sizeof index, &index, sizeof index);
  }
}

template <class Index, class T>
void read_as(const char* payload, size_t kept, size_t count, T* values) {
  const char* const numbers = payload + kept * sizeof(T);
  for (size_t i = 0; i < kept; ++i) {
    Index index;
    std::memcpy(&index, numbers + i * sizeof index, sizeof index);
    if (index >= count) {
      throw Error("a compressed message between hosts is damaged: it has element " + std::to_string(index) + " of " +
                  std::to_string(count));
    }
    std::memcpy(values + index, payload + i * sizeof(T), sizeof(T));
  }
}

}  // namespace

Few::Few(Parameters& parameters) : k_(parameters.number("k", 0.01)) {
  if (k_ > 0 && (k_ < 1 || (k_ == std::floor(k_) && k_ <= 0x1p31))) return;
  throw Error("the parameter k of the compressor '" + parameters.name() +
              "' must be a whole number from 1, or a fraction between 0 and 1");
}

size_t Few::of(const Piece& piece) const {
  if (k_ < 1) return std::max<size_t>(1, static_cast<size_t>(k_ * static_cast<double>(piece.count)));
  const auto k = static_cast<size_t>(k_);
  const size_t total = std::max(piece.total, piece.count);
  return std::min(piece.count, (k * piece.count + total - 1) / total);
}

size_t sparse_bytes(const Piece& piece, size_t kept) {
  const size_t index = piece.count <= kShortIndices ? sizeof(uint16_t) : sizeof(uint32_t);
  return kept * (item_size(piece.dtype) + index);
}

template <class T>
void write_sparse(const Piece& piece, const T* values, const uint32_t* indices, size_t kept, T factor, char* payload) {
  if (piece.count <= kShortIndices) {
    write_as<uint16_t>(values, indices, kept, factor, payload);
  } else {
    write_as<uint32_t>(values, indices, kept, factor, payload);
  }
}

template <class T>
void read_sparse(const Piece& piece, const char* payload, size_t kept, T* values) {
  std::fill_n(values, piece.count, T{0});
  if (piece.count <= kShortIndices) {
    read_as<uint16_t>(payload, kept, piece.count, values);
  } else {
    read_as<uint32_t>(payload, kept, piece.count, values);
  }
}

template void write_sparse(const Piece&, const float*, const uint32_t*, size_t, float, char*);
template void write_sparse(const Piece&, const double*, const uint32_t*, size_t, double, char*);
template void read_sparse(const Piece&, const char*, size_t, float*);
template void read_sparse(const Piece&, const char*, size_t, double*);

}  // namespace mykv::compress
