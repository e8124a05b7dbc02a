// 'randomk': k elements, each set of k as likely as any other. S. U. Stich, J.-B. Cordonnier and M. Jaggi, "Sparsified
// SGD with Memory", NeurIPS 2018: on average 1 - k / n of the squared norm is lost of n elements. Without error
// feedback they are multiplied by n / k, so that their mean is the value: J. Wangni, J. Wang, J. Liu and T. Zhang,
// "Gradient Sparsification for Communication-Efficient Distributed Optimization", NeurIPS 2018.
#include <cmath>

#include "compress/compress_path.h"
#include "compress/compressors.h"
#include "compress/selection.h"
#include "compress/sparse.h"

namespace mykv::compress {

namespace {

// A key that more than k of `count` random keys will reach: six standard deviations more are expected.
uint32_t bound_of_random_keys(size_t count, size_t k) {
  const auto wanted = static_cast<double>(k) + 6 * std::sqrt(static_cast<double>(k)) + 16;
  const double share = wanted / static_cast<double>(count);
  return share >= 1 ? 0 : static_cast<uint32_t>((1 - share) * 0x1p32);
}

class RandomK : public TypedCompressor<RandomK> {
 public:
  explicit RandomK(Parameters& parameters)
      : TypedCompressor(parameters),
        few_(parameters),
        seed_(static_cast<uint64_t>(parameters.whole("seed", 0, 0, INT64_MAX))) {}

  // The same elements are sent of every host's values and of their sum: otherwise an element would have to be chosen
  // twice to arrive, and would arrive that much later.
  bool draws_alike() const override { return true; }
  bool counts_elements() const override { return few_.is_number(); }

  template <class T>
  double encode_values(const Piece& piece, const T* values, const Input& input, char* payload) const {
    static thread_local Selection<uint32_t> found;
    const size_t k = few_.of(piece);
    Draws draws = input.draws;
    draws.seed = seed_;
    select_largest(found, piece.count, k, bound_of_random_keys(piece.count, k),
                   [&](uint32_t* indices, uint32_t* keys, uint32_t bound) {
                     return compress_path().collect_draws(indices, keys, piece.count, draws, bound);
                   });
    // Enlarged only once: the sum is compressed with the same draws, so every element that is sent here is sent there.
    const bool enlarges = !feedback() && !input.again;
    const double factor = enlarges ? static_cast<double>(piece.count) / static_cast<double>(k) : 1;
    write_sparse(piece, values, found.indices.data(), k, static_cast<T>(factor), payload);
    return 0;
  }

  template <class T>
  void decode_values(const Piece& piece, double, const char* payload, T* values) const {
    read_sparse(piece, payload, few_.of(piece), values);
  }

 private:
  size_t payload_bytes(const Piece& piece) const override { return sparse_bytes(piece, few_.of(piece)); }

  Few few_;
  uint64_t seed_;
};

}  // namespace

std::shared_ptr<const Compressor> make_randomk(Parameters& parameters) { return std::make_shared<RandomK>(parameters); }

}  // namespace mykv::compress
