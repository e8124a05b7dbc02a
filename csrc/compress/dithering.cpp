// 'dithering': the size of each element, divided by a norm of the piece, is rounded at random up or down to one of k
// levels, so that the mean over the draws is the exact value. Levels 1/k, 2/k, ... (partition linear): D. Alistarh, D.
// Grubic, J. Li, R. Tomioka and M. Vojnovic, "QSGD: Communication-Efficient SGD via Gradient Quantization and
// Encoding", NeurIPS 2017; with k = 1 and the norm max W. Wen et al., "TernGrad", NeurIPS 2017. Levels ..., 1/4, 1/2, 1
// (natural): S. Horvath, C.-Y. Ho, L. Horvath, A. N. Sahu, M. Canini and P. Richtarik, "Natural Compression for
// Distributed Deep Learning", MSML 2022.
//
// With few levels the error may be larger than the value, and with error feedback it would grow without bound. So with
// error feedback the result is multiplied by the factor that brings it nearest to the values (least squares). The error
// is then at most as large as the values. Unbiased compressors need a factor below 1 for error feedback: A. Beznosikov,
// S. Horvath, P. Richtarik and M. Safaryan, "On Biased Compression for Distributed Learning", JMLR 2023.
#include <cmath>
#include <limits>
#include <vector>

#include "compress/compress_path.h"
#include "compress/compressor.h"

namespace mykv::compress {

namespace {

constexpr int kMostLinear = 32767, kMostNatural = 32;

// Bits of a code for the sign and the numbers 0 to k, rounded up to a power of two.
int code_bits(int64_t k) { return k <= 1 ? 2 : k <= 7 ? 4 : k <= 127 ? 8 : 16; }

class Dithering : public TypedCompressor<Dithering> {
 public:
  explicit Dithering(Parameters& parameters)
      : TypedCompressor(parameters),
        natural_(parameters.choice("partition", "linear", "natural") == "natural"),
        euclidean_(parameters.choice("normalize", "max", "l2") == "l2"),
        k_(parameters.whole("k", natural_ ? 7 : 127, 1, natural_ ? kMostNatural : kMostLinear)),
        seed_(static_cast<uint64_t>(parameters.whole("seed", 0, 0, INT64_MAX))) {}

  template <class T>
  double encode_values(const Piece& piece, const T* values, const Input& input, char* payload) const {
    auto* const words = reinterpret_cast<uint32_t*>(payload);
    const double steps = natural_ ? std::ldexp(1.0, static_cast<int>(k_) - 1) : static_cast<double>(k_);
    const double norm = euclidean_ ? std::sqrt(loops<T>().sum_products(values, values, piece.count))
                                   : static_cast<double>(loops<T>().largest_magnitude(values, piece.count));
    if (!std::isfinite(norm)) return norm;
    Dither<T> dither{static_cast<T>(steps / norm), static_cast<T>(steps), code_bits(k_), natural_, input.draws};
    dither.draws.seed = seed_;
    auto step = static_cast<T>(norm / steps);
    // All values are zero, or so small that their ratios are not finite.
    if (!std::isfinite(dither.factor) || dither.factor == 0) dither.factor = step = 0;
    loops<T>().encode_dither(words, values, piece.count, dither);
    if (feedback()) step = static_cast<T>(static_cast<double>(step) * nearest(piece, values, step, payload));
    return static_cast<double>(step);
  }

  template <class T>
  void decode_values(const Piece& piece, double step, const char* payload, T* values) const {
    loops<T>().decode_dither(values, reinterpret_cast<const uint32_t*>(payload), piece.count, static_cast<T>(step),
                             code_bits(k_), natural_);
  }

 private:
  size_t payload_bytes(const Piece& piece) const override { return packed_bytes(piece.count, code_bits(k_)); }

  // The factor that brings the decoded values nearest to the given values.
  template <class T>
  double nearest(const Piece& piece, const T* values, T step, const char* payload) const {
    static thread_local std::vector<T> decoded;
    if (decoded.size() < piece.count) decoded.resize(piece.count);
    decode_values(piece, static_cast<double>(step), payload, decoded.data());
    const double square = loops<T>().sum_products(decoded.data(), decoded.data(), piece.count);
    const double factor = loops<T>().sum_products(values, decoded.data(), piece.count) / square;
    return std::isfinite(factor) ? factor : 1.0;  // nothing was sent, or squares exceed the range of double
  }

  bool natural_;
  bool euclidean_;
  int64_t k_;
  uint64_t seed_;
};

}  // namespace

std::shared_ptr<const Compressor> make_dithering(Parameters& parameters) {
  return std::make_shared<Dithering>(parameters);
}

}  // namespace mykv::compress
