// 'onebit': the signs, times the mean magnitude of the piece (scaling), which is the multiple of the signs that is
// nearest to the values. S. P. Karimireddy, Q. Rebjock, S. U. Stich and M. Jaggi, "Error Feedback Fixes SignSGD and
// other Gradient Compression Schemes", ICML 2019; S. Zheng, Z. Huang and J. T. Kwok, "Communication-Efficient
// Distributed Blockwise Momentum SGD with Error-Feedback", NeurIPS 2019, has it on both ways. Without scaling 1 and -1:
// J. Bernstein, Y.-X. Wang, K. Azizzadenesheli and A. Anandkumar, "signSGD: Compressed Optimisation for Non-Convex
// Problems", ICML 2018.
#include "compress/compress_path.h"
#include "compress/compressors.h"

namespace mykv::compress {

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
