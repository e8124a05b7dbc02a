// Lossy compression of a piece of an array that is sent between hosts. The size of a message depends only on the number
// of elements, so that the receiver knows it. The loss (residual) is kept and added to the next values (error feedback:
// F. Seide, H. Fu, J. Droppo, G. Li and D. Yu, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
// Distributed Training of Speech DNNs", Interspeech 2014; S. P. Karimireddy, Q. Rebjock, S. U. Stich and M. Jaggi,
// "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019).
//
// Independent of MXNet and MPI: pointers to float32 or float64, counts, bytes. The same values, residual, parameters
// and draws give the same bytes on every CPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "compress/compress_path.h"
#include "kernels/dtype.h"

namespace mykv::compress {

// The user's text for a compressor: its name and its parameters. Ranks compare this text.

class Parameters {
 public:
  // `text`: 'name key=value key=value ...'. Throws Error if the text has another form.
  explicit Parameters(const std::string& text);
  const std::string& text() const { return text_; }
  const std::string& name() const { return name_; }

  // These take a parameter, or return `otherwise` (choice(): `first`) if it was not given. They throw Error, with the
  // parameter and the value, if the value is not valid.
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

// Elements that are compressed together, of an array of `total` elements.
struct Piece {
  DType dtype = DType::float32;  // or float64
  size_t count = 0;
  size_t total = 0;
};

// The values to compress, and how to compress them. Arrays are aligned to their items.
struct Input {
  const void* values = nullptr;
  // In and out, as many elements as `values`: the compression error of the last call, replaced by that of this call.
  // Null: the error is not kept.
  void* residual = nullptr;
  // The factor of all thresholds: 1 for the array itself, another number for a scaled sum.
  double unit = 1.0;
  // The sum of these values and other hosts' values will be compressed too, as for values sent to the owner in an
  // allreduce.
  bool again = false;
  Draws draws;  // without the seed, which the compressor has
};

class Compressor {
 public:
  virtual ~Compressor() = default;
  Compressor(const Compressor&) = delete;
  Compressor& operator=(const Compressor&) = delete;

  // The name and all parameters that the user gave. Compressors with equal texts are equal.
  const std::string& text() const { return text_; }
  // Whether the residual is kept (error feedback).
  bool feedback() const { return feedback_; }

  // Whether all summands and their sum must be compressed with the same draws.
  virtual bool draws_alike() const { return false; }
  // Whether the message has a fixed number of elements; otherwise a fraction of the piece's elements.
  virtual bool counts_elements() const { return false; }

  // Bytes of the message for a piece; 0 for a piece without elements.
  size_t bytes(const Piece& piece) const;
  // Writes the message. If a value, or its sum with the residual, is not finite, the message marks the whole piece as
  // not finite, and the residual does not change: a step with such gradients does not affect later steps.
  void encode(const Piece& piece, const Input& input, char* message) const;
  // The values of the message, the same bits everywhere; NaN in all elements if the values were not finite. Throws
  // Error if the message does not fit the piece.
  void decode(const Piece& piece, const char* message, void* values) const;

 protected:
  // Takes the parameter `ef`, which all compressors have.
  explicit Compressor(Parameters& parameters) : text_(parameters.text()), feedback_(parameters.flag("ef", true)) {}

 private:
  // A message is a header (compressor.cpp), which has room for one number, and a payload.
  virtual size_t payload_bytes(const Piece& piece) const = 0;
  // Compresses finite values; returns the number for the header. It is not finite if the norm of the values is not.
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

// Implements the virtual functions for float and double by two templates of the derived class Self:
// encode_values<T>(piece, values, input, payload) and decode_values<T>(piece, number, payload, values).
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

// The compressors of this build, and the choice among them.

// Each function takes the parameters that it knows and leaves the other parameters.
std::shared_ptr<const Compressor> make_2bit(Parameters& parameters);
std::shared_ptr<const Compressor> make_1bit(Parameters& parameters);
std::shared_ptr<const Compressor> make_onebit(Parameters& parameters);
std::shared_ptr<const Compressor> make_topk(Parameters& parameters);
std::shared_ptr<const Compressor> make_randomk(Parameters& parameters);
std::shared_ptr<const Compressor> make_dithering(Parameters& parameters);

// The compressor of 'name key=value ...', for example 'topk k=0.01 ef=True'. Throws Error, with a message for the user.
std::shared_ptr<const Compressor> make_compressor(const std::string& text);

// The same compressor, created once for each text and never destroyed.
const Compressor& compressor_of(const std::string& text);

}  // namespace mykv::compress
