// '1bit', as in MXNet 2.0: 1 for elements above the threshold, otherwise -1, in one bit. After F. Seide, H. Fu, J.
// Droppo, G. Li and D. Yu, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training
// of Speech DNNs", Interspeech 2014, where the two values are means. Here, as in MXNet, they are 1 and -1, and the
// learning rate must be chosen for them.
#include "base/error.h"
#include "compress/compress_path.h"
#include "compress/compressor.h"

namespace mykv::compress {

namespace {

class OneBit : public TypedCompressor<OneBit> {
 public:
  explicit OneBit(Parameters& parameters)
      : TypedCompressor(parameters), threshold_(parameters.number("threshold", 0.5)) {}

  template <class T>
  double encode_values(const Piece& piece, const T* values, const Input& input, char* payload) const {
    const auto bound = static_cast<T>(threshold_ * input.unit);
    loops<T>().encode_above(reinterpret_cast<uint32_t*>(payload), values, piece.count, bound);
    return input.unit;
  }

  template <class T>
  void decode_values(const Piece& piece, double unit, const char* payload, T* values) const {
    loops<T>().decode_sign(values, reinterpret_cast<const uint32_t*>(payload), piece.count, static_cast<T>(unit));
  }

 private:
  size_t payload_bytes(const Piece& piece) const override { return packed_bytes(piece.count, 1); }

  double threshold_;
};

}  // namespace

std::shared_ptr<const Compressor> make_1bit(Parameters& parameters) { return std::make_shared<OneBit>(parameters); }

// '2bit', as in MXNet: each element is sent as threshold, -threshold or nothing, in two bits. N. Strom, "Scalable
// Distributed DNN Training Using Commodity GPU Cloud Computing", Interspeech 2015, sends the same values as a sparse
// list; the two bits are MXNet's (docs, "Gradient Compression").

namespace {

class TwoBit : public TypedCompressor<TwoBit> {
 public:
  explicit TwoBit(Parameters& parameters)
      : TypedCompressor(parameters), threshold_(parameters.number("threshold", 0.5)) {
    if (!(threshold_ > 0)) throw Error("the threshold of the compressor '2bit' must be above 0");
  }

  template <class T>
  double encode_values(const Piece& piece, const T* values, const Input& input, char* payload) const {
    const auto threshold = static_cast<T>(threshold_ * input.unit);
    loops<T>().encode_two_bit(reinterpret_cast<uint32_t*>(payload), values, piece.count, threshold);
    return static_cast<double>(threshold);
  }

  template <class T>
  void decode_values(const Piece& piece, double threshold, const char* payload, T* values) const {
    loops<T>().decode_two_bit(values, reinterpret_cast<const uint32_t*>(payload), piece.count,
                              static_cast<T>(threshold));
  }

 private:
  size_t payload_bytes(const Piece& piece) const override { return packed_bytes(piece.count, 2); }

  double threshold_;
};

}  // namespace

std::shared_ptr<const Compressor> make_2bit(Parameters& parameters) { return std::make_shared<TwoBit>(parameters); }

// 'onebit': the signs, times the mean magnitude of the piece (scaling). No other multiple of the signs is nearer to the
// values. S. P. Karimireddy, Q. Rebjock, S. U. Stich and M. Jaggi, "Error Feedback Fixes SignSGD and other Gradient
// Compression Schemes", ICML 2019; S. Zheng, Z. Huang and J. T. Kwok, "Communication-Efficient Distributed Blockwise
// Momentum SGD with Error-Feedback", NeurIPS 2019, compresses in both directions. Without scaling the values are 1 and
// -1: J. Bernstein, Y.-X. Wang, K. Azizzadenesheli and A. Anandkumar, "signSGD: Compressed Optimisation for Non-Convex
// Problems", ICML 2018.

namespace {

class Sign : public TypedCompressor<Sign> {
 public:
  explicit Sign(Parameters& parameters) : TypedCompressor(parameters), scaling_(parameters.flag("scaling", true)) {}

  template <class T>
  double encode_values(const Piece& piece, const T* values, const Input& input, char* payload) const {
    loops<T>().encode_sign(reinterpret_cast<uint32_t*>(payload), values, piece.count);
    if (!scaling_) return input.unit;
    const double mean = loops<T>().sum_magnitudes(values, piece.count) / static_cast<double>(piece.count);
    return static_cast<double>(static_cast<T>(mean));
  }

  template <class T>
  void decode_values(const Piece& piece, double magnitude, const char* payload, T* values) const {
    loops<T>().decode_sign(values, reinterpret_cast<const uint32_t*>(payload), piece.count, static_cast<T>(magnitude));
  }

 private:
  size_t payload_bytes(const Piece& piece) const override { return packed_bytes(piece.count, 1); }

  bool scaling_;
};

}  // namespace

std::shared_ptr<const Compressor> make_onebit(Parameters& parameters) { return std::make_shared<Sign>(parameters); }

}  // namespace mykv::compress
