// Arithmetic on NCCL's dtypes.
#include "nccl_types.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace standin {
namespace {

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

struct Half {
  uint16_t bits;

  operator float() const {
    uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16, exponent = (bits >> 10) & 31u, fraction = bits & 1023u;
    if (exponent == 31) return from_bits(sign | 0x7f800000u | fraction << 13);
    if (exponent) return from_bits(sign | (exponent + 112) << 23 | fraction << 13);
    float small = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -small : small;
  }

  static Half of(float value) {  // to nearest, ties to even
    uint32_t bits = to_bits(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
    if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};
    if (magnitude < 0x38800000u) {  // the sum's unit is the smallest half: the addition rounds
      uint32_t units = to_bits(std::fabs(value) + 0.5f) - to_bits(0.5f);
      return {static_cast<uint16_t>(sign | units)};
    }
    uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return {static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
  }
};

struct Brain {
  uint16_t bits;

  operator float() const { return from_bits(static_cast<uint32_t>(bits) << 16); }

  static Brain of(float value) {
    uint32_t bits = to_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
    return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
  }
};

template <class T>
struct In {
  using type = T;
  static T store(T value) { return value; }
};
template <>
struct In<Half> {
  using type = float;
  static Half store(float value) { return Half::of(value); }
};
template <>
struct In<Brain> {
  using type = float;
  static Brain store(float value) { return Brain::of(value); }
};

template <class A>
A add(A a, A b) {
  if constexpr (std::is_integral_v<A>) {
    using U = std::make_unsigned_t<A>;
    return static_cast<A>(static_cast<U>(a) + static_cast<U>(b));
  } else {
    return a + b;
  }
}

template <class A>
A multiply(A a, A b) {
  if constexpr (std::is_integral_v<A>) {
    return static_cast<A>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  } else {
    return a * b;
  }
}

template <class T>
void reduce_as(Op op, const std::vector<const void*>& sources, const std::vector<double>& scalars, void* result,
               size_t count) {
  using A = typename In<T>::type;
  constexpr bool kFloating = std::is_floating_point_v<A>;
  size_t ranks = sources.size();
  std::vector<A> factors;
  for (size_t rank = 0; rank < ranks; ++rank)
    factors.push_back(op == kPreMulSum          ? static_cast<A>(scalars[rank])
                      : op == kAvg && kFloating ? static_cast<A>(1.0 / static_cast<double>(ranks))
                                                : static_cast<A>(1));
  bool scaled = op == kPreMulSum || (op == kAvg && kFloating);
  auto value = [&](size_t rank, size_t index) {
    A one = static_cast<A>(static_cast<const T*>(sources[rank])[index]);
    return scaled ? multiply(one, factors[rank]) : one;
  };
  T* out = static_cast<T*>(result);
  for (size_t index = 0; index < count; ++index) {
    A total = value(0, index);
    for (size_t rank = 1; rank < ranks; ++rank) {
      A next = value(rank, index);
      switch (op) {
        case kProd:
          total = multiply(total, next);
          break;
        case kMax:
          total = std::max(total, next);
          break;
        case kMin:
          total = std::min(total, next);
          break;
        default:
          total = add(total, next);
      }
    }
    if (op == kAvg && !kFloating) total = static_cast<A>(total / static_cast<A>(ranks));
    out[index] = In<T>::store(total);
  }
}

template <class Function>
auto with_type(Type type, Function function) {
  switch (type) {
    case kInt8:
      return function(int8_t{});
    case kUint8:
      return function(uint8_t{});
    case kInt32:
      return function(int32_t{});
    case kUint32:
      return function(uint32_t{});
    case kInt64:
      return function(int64_t{});
    case kUint64:
      return function(uint64_t{});
    case kFloat16:
      return function(Half{});
    case kFloat32:
      return function(float{});
    case kFloat64:
      return function(double{});
    default:
      return function(Brain{});
  }
}

}  // namespace

size_t size_of(Type type) {
  return with_type(type, [](auto zero) { return sizeof zero; });
}

double read_scalar(const void* from, Type type) {
  return with_type(type, [&](auto value) {
    std::memcpy(&value, from, sizeof value);
    using A = typename In<decltype(value)>::type;
    return static_cast<double>(static_cast<A>(value));
  });
}

void reduce(Type type, Op op, const std::vector<const void*>& sources, const std::vector<double>& scalars, void* result,
            size_t count) {
  with_type(type, [&](auto zero) { reduce_as<decltype(zero)>(op, sources, scalars, result, count); });
}

}  // namespace standin
