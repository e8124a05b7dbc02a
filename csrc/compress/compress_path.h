// The interface between the compressors and the files that are compiled for one instruction set each. It has only plain
// data and function pointers: such a file has instructions that this CPU may lack, so it must not share inline code
// with other files.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mykv::compress {

// Counter-based random numbers: the number of element i in step s does not depend on earlier draws or the instruction
// set. Philox4x32-10 of J. K. Salmon, M. A. Moraes, R. O. Dror and D. E. Shaw, "Parallel Random Numbers: As Easy as 1,
// 2, 3", SC 2011.

// Elements are counted in blocks of 64. In block b, element 16 * j + l has word j of the generator's output for the
// counter (16 * b + l, step, low word of stream, high word of stream), so that 16 counters are computed at once.
struct Draws {
  uint64_t seed = 0;  // the key: its low word, its high word
  uint32_t step = 0;
  uint64_t stream = 0;  // different streams have different numbers
};

constexpr uint32_t kDrawBlock = 64;

// Codes of 1, 2, 4, 8 or 16 bits are packed in 32-bit words, 16 neighbours at once: in a group of
// 16 * (32 / bits) elements, element 16 * j + w has the bits [j * bits, (j + 1) * bits) of word w.
constexpr size_t kGroupWords = 16;
constexpr size_t kGroupBytes = kGroupWords * sizeof(uint32_t);
__attribute__((always_inline)) constexpr size_t group_elements(int bits) {
  return kGroupWords * (32 / static_cast<size_t>(bits));
}
__attribute__((always_inline)) constexpr size_t packed_bytes(size_t count, int bits) {
  return (count + group_elements(bits) - 1) / group_elements(bits) * kGroupBytes;
}

// Random rounding to the levels of dithering.
template <typename T>
struct Dither {
  T factor;      // |value| * factor is the size of a value in steps
  T most;        // maximum number of steps
  int bits;      // bits of a code: one sign bit, and the number of the level
  bool natural;  // the levels are 0, 1, 2, 4, 8, ... steps, otherwise 0, 1, 2, 3, ...
  Draws draws;
};

template <typename T>
struct KeyOf;
template <>
struct KeyOf<float> {
  using type = uint32_t;
};
template <>
struct KeyOf<double> {
  using type = uint64_t;
};

// A magnitude as an integer with the same order: the bits of the number without its sign.
template <typename T>
using Key = typename KeyOf<T>::type;

template <typename T>
struct Loops {
  // corrected = values + residual; returns whether all elements are finite. Null residual: corrected = values.
  bool (*correct)(T* corrected, const T* values, const T* residual, size_t count);
  // out = a - b
  void (*subtract)(T* out, const T* a, const T* b, size_t count);

  // Sums in double. Partial sum n of 16 adds the elements n, n + 16, ..., then the partial sums are added in order.
  double (*sum_magnitudes)(const T* values, size_t count);
  double (*sum_products)(const T* a, const T* b, size_t count);
  T (*largest_magnitude)(const T* values, size_t count);

  // Codes 1: value >= threshold, 2: value <= -threshold, 0: otherwise; decoded to threshold, -threshold and 0.
  void (*encode_two_bit)(uint32_t* words, const T* values, size_t count, T threshold);
  void (*decode_two_bit)(T* values, const uint32_t* words, size_t count, T threshold);
  // encode_above(): code 1 for value > bound. encode_sign(): code 1 for value >= 0. All other values have code 0.
  // decode_sign(): code 1 becomes magnitude, code 0 becomes -magnitude.
  void (*encode_above)(uint32_t* words, const T* values, size_t count, T bound);
  void (*encode_sign)(uint32_t* words, const T* values, size_t count);
  void (*decode_sign)(T* values, const uint32_t* words, size_t count, T magnitude);
  // Codes: number of the level, with the sign as the highest bit; decoded to the level times `step`, with the sign.
  void (*encode_dither)(uint32_t* words, const T* values, size_t count, const Dither<T>& dither);
  void (*decode_dither)(T* values, const uint32_t* words, size_t count, T step, int bits, bool natural);

  // Indices and keys of the elements whose keys are at least `bound`, in the order of indices; returns their number.
  size_t (*collect)(uint32_t* indices, Key<T>* keys, const T* values, size_t count, Key<T> bound);
};

struct CompressPath {
  const char* name;
  Loops<float> floats;
  Loops<double> doubles;
  // collect() with the complements of random numbers as keys.
  size_t (*collect_draws)(uint32_t* indices, uint32_t* keys, size_t count, const Draws& draws, uint32_t bound);
};

// Null if the build lacks the instruction set.
const CompressPath* generic_loops();
const CompressPath* avx2_loops();
const CompressPath* avx512_loops();

// The path of the kernels in use (kernels/kernels.h).
const CompressPath& compress_path();

template <typename T>
const Loops<T>& loops();

}  // namespace mykv::compress
