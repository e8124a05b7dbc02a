#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "base/error.h"
#include "compress/compress_path.h"
#include "compress/compressor.h"

namespace mykv::compress {

// Sparse messages: indices in ascending order, and values.

// How many elements are sent: a number for the whole array, or a fraction of it.
class KeptCount {
 public:
  // Takes the parameter 'k': a whole number from 1, or a fraction between 0 and 1.
  explicit KeptCount(Parameters& parameters);
  // The number of elements kept of a piece, at least one: the same share as of the whole array. Rounded up if k is a
  // number of elements, down if k is a fraction.
  size_t of(const Piece& piece) const;
  bool is_number() const { return k_ >= 1; }

 private:
  double k_;
};

size_t sparse_bytes(const Piece& piece, size_t kept);

// Writes the elements at `indices`, times `factor`.
template <class T>
void write_sparse(const Piece& piece, const T* values, const uint32_t* indices, size_t kept, T factor, char* payload);

// Writes all elements: the elements of the payload, and zeros otherwise. Throws Error if an index is outside the piece.
template <class T>
void read_sparse(const Piece& piece, const char* payload, size_t kept, T* values);

// Selects the elements with the k largest keys; of equal keys, the key with the lower index counts as larger.

// Memory of select_largest(), for reuse.
template <class Key>
struct Selection {
  std::vector<uint32_t> indices;  // the result, in ascending order
  std::vector<Key> keys;
  std::vector<Key> order;
};

// collect(indices, keys, bound) finds all elements whose keys are at least `bound`, in the order of their indices, and
// returns their number. `guess`: a bound that at least k keys, and few more, should reach; if fewer reach it, all
// `count` elements are searched.
template <class Key, class Collect>
void select_largest(Selection<Key>& found, size_t count, size_t k, Key guess, Collect&& collect) {
  found.indices.resize(count);
  found.keys.resize(count);
  size_t candidates = collect(found.indices.data(), found.keys.data(), guess);
  if (candidates < k) candidates = collect(found.indices.data(), found.keys.data(), Key{0});
  if (candidates > k) {
    found.order.assign(found.keys.begin(), found.keys.begin() + static_cast<std::ptrdiff_t>(candidates));
    const auto last = found.order.begin() + static_cast<std::ptrdiff_t>(k - 1);
    std::nth_element(found.order.begin(), last, found.order.end(), std::greater<>());
    const Key least = *last;
    const auto larger = std::count_if(found.order.begin(), last, [least](Key key) { return key > least; });
    size_t equal = k - static_cast<size_t>(larger);  // how many elements with the smallest selected key are selected
    size_t kept = 0;
    for (size_t i = 0; i < candidates; ++i) {
      if (found.keys[i] < least || (found.keys[i] == least && equal == 0)) continue;
      if (found.keys[i] == least) --equal;
      found.indices[kept++] = found.indices[i];
    }
  }
}

namespace {

constexpr size_t kShortIndices = size_t{1} << 16;  // elements of the largest piece with two-byte indices

template <class Index, class T>
void write_as(const T* values, const uint32_t* indices, size_t kept, T factor, char* payload) {
  char* const numbers = payload + kept * sizeof(T);
  for (size_t i = 0; i < kept; ++i) {
    const T value = values[indices[i]] * factor;
    const auto index = static_cast<Index>(indices[i]);
    std::memcpy(payload + i * sizeof value, &value, sizeof value);
    std::memcpy(numbers + i * sizeof index, &index, sizeof index);
  }
}

template <class Index, class T>
void read_as(const char* payload, size_t kept, size_t count, T* values) {
  const char* const numbers = payload + kept * sizeof(T);
  for (size_t i = 0; i < kept; ++i) {
    Index index;
    std::memcpy(&index, numbers + i * sizeof index, sizeof index);
    if (index >= count) {
      throw Error("a compressed message between hosts is damaged: it has element " + std::to_string(index) + " of " +
                  std::to_string(count));
    }
    std::memcpy(values + index, payload + i * sizeof(T), sizeof(T));
  }
}

}  // namespace

KeptCount::KeptCount(Parameters& parameters) : k_(parameters.number("k", 0.01)) {
  if (k_ > 0 && (k_ < 1 || (k_ == std::floor(k_) && k_ <= 0x1p31))) return;
  throw Error("the parameter k of the compressor '" + parameters.name() +
              "' must be a whole number from 1, or a fraction between 0 and 1");
}

size_t KeptCount::of(const Piece& piece) const {
  if (k_ < 1) return std::max<size_t>(1, static_cast<size_t>(k_ * static_cast<double>(piece.count)));
  const auto k = static_cast<size_t>(k_);
  const size_t total = std::max(piece.total, piece.count);
  return std::min(piece.count, (k * piece.count + total - 1) / total);
}

size_t sparse_bytes(const Piece& piece, size_t kept) {
  const size_t index = piece.count <= kShortIndices ? sizeof(uint16_t) : sizeof(uint32_t);
  return kept * (item_size(piece.dtype) + index);
}

template <class T>
void write_sparse(const Piece& piece, const T* values, const uint32_t* indices, size_t kept, T factor, char* payload) {
  if (piece.count <= kShortIndices) {
    write_as<uint16_t>(values, indices, kept, factor, payload);
  } else {
    write_as<uint32_t>(values, indices, kept, factor, payload);
  }
}

template <class T>
void read_sparse(const Piece& piece, const char* payload, size_t kept, T* values) {
  std::fill_n(values, piece.count, T{0});
  if (piece.count <= kShortIndices) {
    read_as<uint16_t>(payload, kept, piece.count, values);
  } else {
    read_as<uint32_t>(payload, kept, piece.count, values);
  }
}

template void write_sparse(const Piece&, const float*, const uint32_t*, size_t, float, char*);
template void write_sparse(const Piece&, const double*, const uint32_t*, size_t, double, char*);
template void read_sparse(const Piece&, const char*, size_t, float*);
template void read_sparse(const Piece&, const char*, size_t, double*);

namespace {

// A compressor that sends k elements, which the subclass selects in encode_values().
template <class Kind>
class Sparse : public TypedCompressor<Kind> {
 public:
  explicit Sparse(Parameters& parameters) : TypedCompressor<Kind>(parameters), kept_(parameters) {}

  bool counts_elements() const final { return kept_.is_number(); }

  template <class T>
  void decode_values(const Piece& piece, double, const char* payload, T* values) const {
    read_sparse(piece, payload, kept_.of(piece), values);
  }

 protected:
  size_t kept_of(const Piece& piece) const { return kept_.of(piece); }

 private:
  size_t payload_bytes(const Piece& piece) const final { return sparse_bytes(piece, kept_.of(piece)); }

  KeptCount kept_;
};

}  // namespace

// 'topk': the k elements of the largest magnitude. A. F. Aji and K. Heafield, "Sparse Communication for Distributed
// Gradient Descent", EMNLP 2017; S. U. Stich, J.-B. Cordonnier and M. Jaggi, "Sparsified SGD with Memory", NeurIPS
// 2018: of n elements, at most 1 - k / n of the squared norm is lost.

namespace {

constexpr size_t kSample = 4096;

template <class T>
Key<T> key_of(T value) {
  Key<T> bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits & (static_cast<Key<T>>(~Key<T>{0}) >> 1);
}

// Estimates a key that slightly more than k elements reach, from a sample of evenly spaced elements.
template <class T>
Key<T> guess_bound(const T* values, size_t count, size_t k, std::vector<Key<T>>& sample) {
  const double expected = static_cast<double>(kSample) * static_cast<double>(k) / static_cast<double>(count);
  const auto rank =
      static_cast<size_t>(expected + 3 * std::sqrt(expected) + 8);  // plus three standard deviations, and some room
  if (count < 4 * kSample || rank >= kSample / 2) return 0;
  sample.resize(kSample);
  const size_t distance = count / kSample;
  for (size_t i = 0; i < kSample; ++i) sample[i] = key_of(values[i * distance]);
  const auto nth = sample.begin() + static_cast<std::ptrdiff_t>(rank);
  std::nth_element(sample.begin(), nth, sample.end(), std::greater<>());
  return *nth;
}

class TopK : public Sparse<TopK> {
 public:
  explicit TopK(Parameters& parameters) : Sparse(parameters) {}

  template <class T>
  double encode_values(const Piece& piece, const T* values, const Input&, char* payload) const {
    static thread_local Selection<Key<T>> found;
    const size_t k = kept_of(piece);
    const Key<T> guess = guess_bound(values, piece.count, k, found.order);
    select_largest(found, piece.count, k, guess, [&](uint32_t* indices, Key<T>* keys, Key<T> bound) {
      return loops<T>().collect(indices, keys, values, piece.count, bound);
    });
    write_sparse(piece, values, found.indices.data(), k, T{1}, payload);
    return 0;
  }
};

}  // namespace

std::shared_ptr<const Compressor> make_topk(Parameters& parameters) { return std::make_shared<TopK>(parameters); }

// 'randomk': k elements, chosen at random; each set of k elements is equally likely. S. U. Stich, J.-B. Cordonnier and
// M. Jaggi, "Sparsified SGD with Memory", NeurIPS 2018: of n elements, on average 1 - k / n of the squared norm is
// lost. Without error feedback the elements are multiplied by n / k, so that the mean over the draws is the exact
// value: J. Wangni, J. Wang, J. Liu and T. Zhang, "Gradient Sparsification for Communication-Efficient Distributed
// Optimization", NeurIPS 2018.

namespace {

// A bound that at least k of `count` random keys almost surely reach: the expected number of keys that reach it is k
// plus six standard deviations.
uint32_t bound_of_random_keys(size_t count, size_t k) {
  const auto wanted = static_cast<double>(k) + 6 * std::sqrt(static_cast<double>(k)) + 16;
  const double share = wanted / static_cast<double>(count);
  return share >= 1 ? 0 : static_cast<uint32_t>((1 - share) * 0x1p32);
}

class RandomK : public Sparse<RandomK> {
 public:
  explicit RandomK(Parameters& parameters)
      : Sparse(parameters), seed_(static_cast<uint64_t>(parameters.whole("seed", 0, 0, INT64_MAX))) {}

  // All hosts' values and their sum must send the same elements: otherwise an element would arrive only if drawn twice.
  bool draws_alike() const override { return true; }

  template <class T>
  double encode_values(const Piece& piece, const T* values, const Input& input, char* payload) const {
    static thread_local Selection<uint32_t> found;
    const size_t k = kept_of(piece);
    Draws draws = input.draws;
    draws.seed = seed_;
    select_largest(found, piece.count, k, bound_of_random_keys(piece.count, k),
                   [&](uint32_t* indices, uint32_t* keys, uint32_t bound) {
                     return compress_path().collect_draws(indices, keys, piece.count, draws, bound);
                   });
    // Multiplied only once: the sum will be compressed with the same draws, so it sends the same elements.
    const bool enlarges = !feedback() && !input.again;
    const double factor = enlarges ? static_cast<double>(piece.count) / static_cast<double>(k) : 1;
    write_sparse(piece, values, found.indices.data(), k, static_cast<T>(factor), payload);
    return 0;
  }

 private:
  uint64_t seed_;
};

}  // namespace

std::shared_ptr<const Compressor> make_randomk(Parameters& parameters) { return std::make_shared<RandomK>(parameters); }

}  // namespace mykv::compress
