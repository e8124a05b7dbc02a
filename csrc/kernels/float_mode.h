// How this thread's floating-point unit rounds.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace mykv {

#if defined(__x86_64__)

inline unsigned read_float_mode() { return _mm_getcsr(); }
inline void write_float_mode(unsigned mode) { _mm_setcsr(mode); }
constexpr unsigned kUnusualModes = 0x8000 | 0x6000 | 0x0040;  // flush to zero, rounding mode, denormals are zero

#elif defined(__aarch64__)

inline uint64_t read_float_mode() {
  uint64_t mode = 0;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
inline void write_float_mode(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
constexpr uint64_t kUnusualModes =
    0x07c80000;  // alternative half, default NaN, flush to zero (also halves), rounding mode

#else

inline unsigned read_float_mode() { return 0; }
inline void write_float_mode(unsigned) {}
constexpr unsigned kUnusualModes = 0;

#endif

// Libraries built with -ffast-math leave their threads flushing subnormals to zero, and threads inherit that mode. Two
// ranks must not round differently because of it, so the kernels run with the default rounding and with subnormals.
class DefaultFloatMode {
 public:
  DefaultFloatMode() : saved_(read_float_mode()) {
    if ((saved_ & kUnusualModes) != 0) write_float_mode(saved_ & ~kUnusualModes);
  }
  ~DefaultFloatMode() {
    if ((saved_ & kUnusualModes) != 0) write_float_mode(saved_);
  }
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
  const decltype(read_float_mode()) saved_;
};

}  // namespace mykv
