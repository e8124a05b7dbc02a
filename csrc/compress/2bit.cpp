// '2bit', MXNet's own: of each element threshold, -threshold or nothing is sent, in two bits. N. Strom, "Scalable
// Distributed DNN Training Using Commodity GPU Cloud Computing", Interspeech 2015, sends the same values as a sparse
// list; the two bits are MXNet's (docs, "Gradient Compression").
#include "base/error.h"
#include "compress/compress_path.h"
#include "compress/compressors.h"

namespace mykv::compress {

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

}  // namespace mykv::compress
