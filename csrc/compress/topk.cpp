// 'topk': the k elements of the largest magnitude. A. F. Aji and K. Heafield, "Sparse Communication for Distributed
// Gradient Descent", EMNLP 2017; S. U. Stich, J.-B. Cordonnier and M. Jaggi, "Sparsified SGD with Memory", NeurIPS
// 2018: what is lost of n elements is at most 1 - k / n of the squared norm.
#include <cmath>
#include <cstring>

#include "compress/compress_path.h"
#include "compress/compressors.h"
#include "compress/selection.h"
#include "compress/sparse.h"

namespace mykv::compress {

namespace {

constexpr size_t kSample = 4096;

template <class T>
Key<T> key_of(T value) {
  Key<T> bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits & (static_cast<Key<T>>(~Key<T>{0}) >> 1);
}

// A key that a few more than k of the elements should reach, from a sample of elements at even distances.
template <class T>
Key<T> guess_bound(const T* values, size_t count, size_t k, std::vector<Key<T>>& sample) {
  const double expected = static_cast<double>(kSample) * static_cast<double>(k) / static_cast<double>(count);
  const auto rank = static_cast<size_t>(expected + 3 * std::sqrt(expected) + 8);  // three standard deviations more
  if (count < 4 * kSample || rank >= kSample / 2) return 0;
  sample.resize(kSample);
  const size_t distance = count / kSample;
  for (size_t i = 0; i < kSample; ++i) sample[i] = key_of(values[i * distance]);
  const auto nth = sample.begin() + static_cast<std::ptrdiff_t>(rank);
  std::nth_element(sample.begin(), nth, sample.end(), std::greater<>());
  return *nth;
}

class TopK : public TypedCompressor<TopK> {
 public:
  explicit TopK(Parameters& parameters) : TypedCompressor(parameters), few_(parameters) {}

  bool counts_elements() const override { return few_.is_number(); }

  template <class T>
  double encode_values(const Piece& piece, const T* values, const Input&, char* payload) const {
    static thread_local Selection<Key<T>> found;
    const size_t k = few_.of(piece);
    const Key<T> guess = guess_bound(values, piece.count, k, found.order);
    select_largest(found, piece.count, k, guess, [&](uint32_t* indices, Key<T>* keys, Key<T> bound) {
      return loops<T>().collect(indices, keys, values, piece.count, bound);
    });
    write_sparse(piece, values, found.indices.data(), k, T{1}, payload);
    return 0;
  }

  template <class T>
  void decode_values(const Piece& piece, double, const char* payload, T* values) const {
    read_sparse(piece, payload, few_.of(piece), values);
  }

 private:
  size_t payload_bytes(const Piece& piece) const override { return sparse_bytes(piece, few_.of(piece)); }

  Few few_;
};

}  // namespace

std::shared_ptr<const Compressor> make_topk(Parameters& parameters) { return std::make_shared<TopK>(parameters); }

}  // namespace mykv::compress
