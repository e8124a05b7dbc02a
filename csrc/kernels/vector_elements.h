// Arithmetic on one vector register of each element type. Included once by each kernels_*.cpp, which sets
// MYKV_VECTOR_BYTES; everything is in an unnamed namespace, and no std:: template is used, so that the linker can never
// take code compiled for one instruction set into another path.
//
// It is written with the compiler's vector types: every lane is plain IEEE arithmetic, hence the same bits on every
// path. -ffp-contract=off keeps a product and a sum from becoming a fused multiply-add, which rounds once. A NaN's sign
// and payload do depend on the order of operands that the compiler chose, so results are given one canonical NaN.
//
// An element type E has
//   E::Acc                                one vector of memory, widened for accumulation
//   E::load(p)                            kVectorBytes at p, any alignment
//   E::combine<op>(a, b)
//   E::finish<op>(acc, scale)             scales, rounds, packs
#pragma once

#include "kernels/dtype.h"
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define MYKV_INLINE static inline __attribute__((always_inline))

namespace mykv {
namespace {

constexpr size_t kVectorBytes = MYKV_VECTOR_BYTES;

template <typename T>
struct VectorOf {
  typedef T type __attribute__((vector_size(MYKV_VECTOR_BYTES)));
};
template <typename T>
using Vector = typename VectorOf<T>::type;

using Bits = Vector<uint64_t>;  // a vector of any element type, as stored in memory
using Floats = Vector<float>;
using Words = Vector<uint32_t>;

template <typename V>
MYKV_INLINE V load_vector(const char* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

template <typename V>
MYKV_INLINE V select(decltype(V{} < V{}) mask, V yes, V no) {
  return mask ? yes : no;
}

// Of equal values, the earlier input `a` is taken. A NaN in either input is the result. For integers the compiler
// removes the test for NaN.
template <ReduceOp op, typename V>
MYKV_INLINE V combine_lanes(V a, V b) {
  if constexpr (op == ReduceOp::sum) return a + b;
  if constexpr (op == ReduceOp::product) return a * b;
  if constexpr (op == ReduceOp::min) return select<V>((b < a) | (b != b), b, a);
  if constexpr (op == ReduceOp::max) return select<V>((b > a) | (b != b), b, a);
}

// A scale of 1 needs no branch: multiplying by 1 changes only NaNs, which are replaced anyway.
template <typename T>
MYKV_INLINE Vector<T> scale_lanes(Vector<T> value, double scale) {
  value = value * static_cast<T>(scale);
  const Vector<T> nan = Vector<T>{} + static_cast<T>(__builtin_nan(""));
  return select<Vector<T>>(value == value, value, nan);
}

template <typename T>
struct FloatingElements {
  using Acc = Vector<T>;
  MYKV_INLINE Acc load(const char* p) { return load_vector<Acc>(p); }
  template <ReduceOp op>
  MYKV_INLINE Acc combine(Acc a, Acc b) {
    return combine_lanes<op>(a, b);
  }
  template <ReduceOp op>
  MYKV_INLINE Bits finish(Acc acc, double scale) {
    return reinterpret_cast<Bits>(scale_lanes<T>(acc, scale));
  }
};

template <typename T>
struct Limits {  // std::numeric_limits would be a template shared between the paths
  static constexpr bool is_signed = static_cast<T>(-1) < static_cast<T>(0);
  static constexpr int kValueBits = static_cast<int>(sizeof(T)) * 8 - (is_signed ? 1 : 0);
  static constexpr T max = static_cast<T>(~uint64_t{0} >> (64 - kValueBits));
  static constexpr T min = is_signed ? static_cast<T>(-max - 1) : static_cast<T>(0);
  static constexpr double above_max =
      static_cast<double>(uint64_t{1} << (kValueBits - 1)) * 2;  // exact, unlike double(max)
};

// The product is rounded to a double before it is truncated, so that 3 * (1. / 3) is 1.
template <typename T>
MYKV_INLINE T scale_integer(T value, double scale) {
  const double scaled = static_cast<double>(value) * scale;
  if (scaled >= Limits<T>::above_max) return Limits<T>::max;
  if (scaled <= static_cast<double>(Limits<T>::min)) return Limits<T>::min;
  return scaled == scaled ? static_cast<T>(scaled) : T{0};
}

// Not inlined, since integers are rarely scaled and every loop would become large.
template <typename T>
__attribute__((noinline)) static void scale_integers(T* values, double scale) {
  for (size_t i = 0; i < kVectorBytes / sizeof(T); ++i) values[i] = scale_integer<T>(values[i], scale);
}

// T: the C type of the elements, signed or unsigned. U: the unsigned type, since only unsigned arithmetic may wrap
// around.
template <typename T, typename U>
struct IntegerElements {
  using Acc = Vector<T>;
  MYKV_INLINE Acc load(const char* p) { return load_vector<Acc>(p); }
  template <ReduceOp op>
  MYKV_INLINE Acc combine(Acc a, Acc b) {
    if constexpr (op == ReduceOp::sum || op == ReduceOp::product) {
      return reinterpret_cast<Acc>(combine_lanes<op>(reinterpret_cast<Vector<U>>(a), reinterpret_cast<Vector<U>>(b)));
    } else {
      return combine_lanes<op>(a, b);
    }
  }
  template <ReduceOp op>
  MYKV_INLINE Bits finish(Acc acc, double scale) {
    if (scale == 1) return reinterpret_cast<Bits>(acc);
    T values[kVectorBytes / sizeof(T)];
    __builtin_memcpy(values, &acc, sizeof values);
    scale_integers(values, scale);
    return load_vector<Bits>(reinterpret_cast<const char*>(values));
  }
};

struct BoolElements {
  using Acc = Vector<uint8_t>;
  MYKV_INLINE Acc load(const char* p) {
    const Acc one = Acc{} + 1;
    return select<Acc>(load_vector<Acc>(p) != 0, one, Acc{});
  }
  template <ReduceOp op>
  MYKV_INLINE Acc combine(Acc a, Acc b) {
    return op == ReduceOp::sum || op == ReduceOp::max ? a | b : a & b;
  }
  template <ReduceOp op>
  MYKV_INLINE Bits finish(Acc acc, double) {
    return reinterpret_cast<Bits>(acc);
  }
};

struct FloatPair {
  Floats first, second;
};

// 16-bit floats: a vector of memory is widened to two vectors of float32. If Format::kAlternate, the two vectors hold
// the elements of even and of odd index; otherwise they hold the first and the second half of the elements.
template <typename Format>
struct HalfElements {
  using Acc = FloatPair;
  MYKV_INLINE Acc load(const char* p) { return Format::widen(p); }
  template <ReduceOp op>
  MYKV_INLINE Acc combine(Acc a, Acc b) {
    return {combine_lanes<op>(a.first, b.first), combine_lanes<op>(a.second, b.second)};
  }
  template <ReduceOp op>
  MYKV_INLINE Bits finish(Acc acc, double scale) {
    return Format::narrow({scale_lanes<float>(acc.first, scale), scale_lanes<float>(acc.second, scale)});
  }
};

// Widens to even and odd elements, which needs no shuffle in either direction.
struct BFloat16Format {
  static constexpr bool kAlternate = true;
  MYKV_INLINE FloatPair widen(const char* p) {
    const Words pairs = load_vector<Words>(p);
    return {reinterpret_cast<Floats>(pairs << 16), reinterpret_cast<Floats>(pairs & 0xffff0000u)};
  }
  // Rounds to nearest even in the upper 16 bits. The sum cannot overflow for the canonical NaN.
  MYKV_INLINE Words round(Floats value) {
    const Words bits = reinterpret_cast<Words>(value);
    return bits + 0x7fffu + ((bits >> 16) & 1u);
  }
  MYKV_INLINE Bits narrow(FloatPair value) {
    return reinterpret_cast<Bits>((round(value.first) >> 16) | (round(value.second) & 0xffff0000u));
  }
};

#if MYKV_VECTOR_BYTES == 64

struct Float16Format {
  static constexpr bool kAlternate = false;
  MYKV_INLINE FloatPair widen(const char* p) { return {widen_lanes(p), widen_lanes(p + 32)}; }
  MYKV_INLINE Bits narrow(FloatPair value) {
    const __m512i low = _mm512_castsi256_si512(narrow_lanes(value.first));
    return reinterpret_cast<Bits>(_mm512_maskz_inserti64x4(0xff, low, narrow_lanes(value.second), 1));
  }

 private:
  // These functions use the instructions with a full mask: GCC 12 warns of an uninitialized value in the instructions
  // without a mask when they are inlined.
  MYKV_INLINE Floats widen_lanes(const char* p) {
    return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  MYKV_INLINE __m256i narrow_lanes(Floats value) {
    return _mm512_maskz_cvtps_ph(0xffff, value, _MM_FROUND_TO_NEAREST_INT);
  }
};

#elif MYKV_VECTOR_BYTES == 32

struct Float16Format {
  static constexpr bool kAlternate = false;
  MYKV_INLINE FloatPair widen(const char* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)))};
  }
  MYKV_INLINE Bits narrow(FloatPair value) {
    const __m256i low = _mm256_castsi128_si256(_mm256_cvtps_ph(value.first, _MM_FROUND_TO_NEAREST_INT));
    return reinterpret_cast<Bits>(
        _mm256_inserti128_si256(low, _mm256_cvtps_ph(value.second, _MM_FROUND_TO_NEAREST_INT), 1));
  }
};

#elif defined(__aarch64__)

struct Float16Format {
  static constexpr bool kAlternate = false;
  MYKV_INLINE FloatPair widen(const char* p) {
    const float16x8_t halves = load_vector<float16x8_t>(p);
    return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
  }
  MYKV_INLINE Bits narrow(FloatPair value) {
    return reinterpret_cast<Bits>(vcvt_high_f16_f32(vcvt_f16_f32(value.first), value.second));
  }
};

#else

// IEEE half precision with integer arithmetic and the float unit's own rounding; even and odd elements as above.
struct Float16Format {
  static constexpr bool kAlternate = true;
  // The exponent is rebiased by a multiplication, which also normalizes subnormals. `half` is in the low 16 bits.
  MYKV_INLINE Floats widen_lanes(Words half) {
    const Words magnitude = half & 0x7fffu;
    const Words finite = reinterpret_cast<Words>(reinterpret_cast<Floats>(magnitude << 13) * 0x1p112f);
    const Words special = (magnitude << 13) | 0x7f800000u;  // infinity and NaN
    const Words bits = select<Words>(magnitude >= 0x7c00u, special, finite);
    return reinterpret_cast<Floats>(bits | ((half & 0x8000u) << 16));
  }
  MYKV_INLINE FloatPair widen(const char* p) {
    const Words pairs = load_vector<Words>(p);
    return {widen_lanes(pairs & 0xffffu), widen_lanes(pairs >> 16)};
  }
  MYKV_INLINE Words narrow_lanes(Floats value) {
    const Words bits = reinterpret_cast<Words>(value);
    const Words magnitude = bits & 0x7fffffffu;
    const Words normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // The last bit of 0.5 has the weight 2^-24, like the last bit of a half's subnormals. So adding 0.5 rounds to
    // subnormals.
    const Floats half_unit = Floats{} + 0.5f;
    const Words subnormal =
        reinterpret_cast<Words>(reinterpret_cast<Floats>(magnitude) + half_unit) - reinterpret_cast<Words>(half_unit);
    const Words infinity = Words{} + 0x7c00u;
    const Words nan = Words{} + 0x7e00u;
    Words result = select<Words>(magnitude < 0x38800000u, subnormal, normal);  // 2^-14
    result = select<Words>(magnitude >= 0x477ff000u, infinity, result);        // 65520 rounds to infinity
    result = select<Words>(magnitude > 0x7f800000u, nan, result);
    return result | ((bits >> 16) & 0x8000u);
  }
  MYKV_INLINE Bits narrow(FloatPair value) {
    return reinterpret_cast<Bits>(narrow_lanes(value.first) | (narrow_lanes(value.second) << 16));
  }
};

#endif

}  // namespace
}  // namespace mykv
