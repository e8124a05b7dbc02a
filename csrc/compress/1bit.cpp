// '1bit', MXNet's own (2.0): 1 for elements above the threshold, otherwise -1, in one bit. After F. Seide, H. Fu, J.
// Droppo, G. Li and D. Yu, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training
// of Speech DNNs", Interspeech 2014, where the two values are means; here, as in MXNet, they are 1 and -1, and the
// learning rate must be chosen for them.
#include "compress/compress_path.h"
#include "compress/compressors.h"

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

}  // namespace mykv::compress
