// Lossy compression of a piece of an array for its way between hosts. The size of a message follows from the number of
// elements alone, so that the receiver knows it. What a compressor has lost is kept and added to what it is given the
// next time (error feedback: F. Seide, H. Fu, J. Droppo, G. Li and D. Yu, "1-Bit Stochastic Gradient Descent and its
// Application to Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014; S. P. Karimireddy, Q. Rebjock,
// S. U. Stich and M. Jaggi, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019).
//
// Nothing here knows MXNet or MPI: pointers to float32 or float64, counts, bytes. The same values, residual, parameters
// and draws give the same bytes on every CPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "compress/parameters.h"
#include "compress/philox.h"
#include "kernels/dtype.h"

namespace mykv::compress {

// Elements that are compressed together, of an array of `total` elements.
struct Piece {
  DType dtype = DType::float32;  // or float64
  size_t count = 0;
  size_t total = 0;
};

// What is compressed, and how. Arrays are aligned to their items.
struct Input {
  const void* values = nullptr;
  // Of as many elements: what was lost before, replaced by what is lost now. Null where nothing is kept.
  void* residual = nullptr;
  // The size of one worker's value in units of which thresholds are given: that of the array itself is 1, that of a
  // scaled sum is another.
  double unit = 1.0;
  // The sum of these values and others will be compressed too: of an allreduce, what each host sends to the owner.
  bool again = false;
  Draws draws;  // but for the seed, which is the compressor's
};

class Compressor {
 public:
  virtual ~Compressor() = default;
  Compressor(const Compressor&) = delete;
  Compressor& operator=(const Compressor&) = delete;

  // The name and all parameters that the user gave: equal texts, equal compressors.
  const std::string& text() const { return text_; }
  // Whether what is lost is to be kept.
  bool feedback() const { return feedback_; }

  // Whether all that is summed, and the sum, are to be compressed with the same draws.
  virtual bool draws_alike() const { return false; }

  // Bytes of the message for a piece; 0 for none of elements.
  size_t bytes(const Piece& piece) const;
  // Writes the message. Where a value, or its sum with the residual, is not finite, the message says so of the whole
  // piece, and the residual stays as it is: a step with such gradients spoils nothing that comes later.
  void encode(const Piece& piece, const Input& input, char* message) const;
  // What the message says, the same bits everywhere; NaN in all elements where the values were not finite. Throws Error
  // where the message is none for such a piece.
  void decode(const Piece& piece, const char* message, void* values) const;

 protected:
  // Takes the parameter that all have.
  explicit Compressor(Parameters& parameters) : text_(parameters.text()), feedback_(parameters.flag("ef", true)) {}

 private:
  // A message is a header (compressor.cpp), which has room for one number, and a payload.
  virtual size_t payload_bytes(const Piece& piece) const = 0;
  // Compresses finite values; returns the number for the header, or one that is not finite where their norm is not.
  virtual double encode_payload(const Piece& piece, const float* values, const Input& input, char* payload) const = 0;
  virtual double encode_payload(const Piece& piece, const double* values, const Input& input, char* payload) const = 0;
  virtual void decode_payload(const Piece& piece, double number, const char* payload, float* values) const = 0;
  virtual void decode_payload(const Piece& piece, double number, const char* payload, double* values) const = 0;

  template <class T>
  void encode_as(const Piece& piece, const Input& input, char* message) const;
  template <class T>
  void decode_as(const Piece& piece, const char* message, T* values) const;

  const std::string text_;
  const bool feedback_;
};

// Writes the functions for both types by means of the templates encode_values<T>(piece, values, input, payload) and
// decode_values<T>(piece, number, payload, values) of the class itself.
template <class Self>
class TypedCompressor : public Compressor {
 protected:
  using Compressor::Compressor;

 private:
  double encode_payload(const Piece& piece, const float* values, const Input& input, char* payload) const final {
    return self().template encode_values<float>(piece, values, input, payload);
  }
  double encode_payload(const Piece& piece, const double* values, const Input& input, char* payload) const final {
    return self().template encode_values<double>(piece, values, input, payload);
  }
  void decode_payload(const Piece& piece, double number, const char* payload, float* values) const final {
    self().template decode_values<float>(piece, number, payload, values);
  }
  void decode_payload(const Piece& piece, double number, const char* payload, double* values) const final {
    self().template decode_values<double>(piece, number, payload, values);
  }
  const Self& self() const { return static_cast<const Self&>(*this); }
};

// The compressor of 'name key=value ...', for example 'topk k=0.01 ef=True'. Throws Error, with a sentence for the
// user.
std::shared_ptr<const Compressor> make_compressor(const std::string& text);

// The same, made once for each text and never destroyed.
const Compressor& compressor_of(const std::string& text);

}  // namespace mykv::compress
