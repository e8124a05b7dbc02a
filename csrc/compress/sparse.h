// Messages of some elements: their indices, in ascending order, and their values.
#pragma once

#include <cstdint>
#include <string>

#include "compress/compressor.h"

namespace mykv::compress {

// How many elements are sent: a number for the whole array, or a fraction of it.
class Few {
 public:
  // Takes the parameter 'k': a whole number from 1, or a fraction between 0 and 1.
  explicit Few(Parameters& parameters);
  // For a piece: the same fraction as for the array, at least one element. A number is rounded up, a fraction down.
  size_t of(const Piece& piece) const;
  bool is_number() const { return k_ >= 1; }

 private:
  double k_;
};

size_t sparse_bytes(const Piece& piece, size_t kept);

// Writes the elements at `indices`, times `factor`.
template <class T>
void write_sparse(const Piece& piece, const T* values, const uint32_t* indices, size_t kept, T factor, char* payload);

// Writes all elements: the elements of the payload, and zeros otherwise. Throws Error if an index is out of the piece.
template <class T>
void read_sparse(const Piece& piece, const char* payload, size_t kept, T* values);

}  // namespace mykv::compress
