// The loads and stores of an allreduce in shared memory, and nothing else; for two ranks: a[i] = b[i] = a[i] + b[i].
// Which access pattern suits a memory system best is unknown, so there are several plain kernels, and the fastest is
// the limit. They are independent of the core's kernels, and compiled for this machine.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <cstddef>
#include <initializer_list>

#if defined(__AVX512F__)
#include <immintrin.h>
using Vector = __m512;
constexpr size_t kLanes = 16;
inline Vector add(const float* a, const float* b) { return _mm512_add_ps(_mm512_load_ps(a), _mm512_load_ps(b)); }
inline void store(float* p, Vector v) { _mm512_store_ps(p, v); }
inline void stream(float* p, Vector v) { _mm512_stream_ps(p, v); }
inline void fence() { _mm_sfence(); }
#elif defined(__AVX__)
#include <immintrin.h>
using Vector = __m256;
constexpr size_t kLanes = 8;
inline Vector add(const float* a, const float* b) { return _mm256_add_ps(_mm256_load_ps(a), _mm256_load_ps(b)); }
inline void store(float* p, Vector v) { _mm256_store_ps(p, v); }
inline void stream(float* p, Vector v) { _mm256_stream_ps(p, v); }
inline void fence() { _mm_sfence(); }
#else
using Vector = float;
constexpr size_t kLanes = 1;
inline Vector add(const float* a, const float* b) { return *a + *b; }
inline void store(float* p, Vector v) { *p = v; }
inline void stream(float* p, Vector v) { *p = v; }
inline void fence() {}
#endif

namespace {

constexpr size_t kAhead = 256;   // floats that are prefetched ahead, 1 KB
constexpr size_t kBlock = 1024;  // floats of a block, 4 KB, which the nearest cache holds
constexpr size_t kLine = 16;     // floats of a cache line

void plain(float* a, float* b, size_t count) {
  for (size_t i = 0; i < count; i += kLanes) {
    const Vector sum = add(a + i, b + i);
    store(a + i, sum);
    store(b + i, sum);
  }
}

void prefetching(float* a, float* b, size_t count) {
  for (size_t i = 0; i < count; i += kLine) {
    __builtin_prefetch(a + i + kAhead, 1);
    __builtin_prefetch(b + i + kAhead, 1);
    for (size_t k = i; k < i + kLine; k += kLanes) {
      const Vector sum = add(a + k, b + k);
      store(a + k, sum);
      store(b + k, sum);
    }
  }
}

void streaming(float* a, float* b, size_t count) {
  for (size_t i = 0; i < count; i += kLanes) {
    const Vector sum = add(a + i, b + i);
    stream(a + i, sum);
    stream(b + i, sum);
  }
  fence();
}

// Reads of both arrays first, then writes of one array after the other, so that memory switches less often between
// reads and writes.
void blocks(float* a, float* b, size_t count) {
  alignas(64) float sums[kBlock];
  for (size_t i = 0; i < count; i += kBlock) {
    for (size_t k = 0; k < kBlock; k += kLanes) store(sums + k, add(a + i + k, b + i + k));
    for (float* out : {a + i, b + i}) {
      for (size_t k = 0; k < kBlock; k += kLine) __builtin_memcpy(out + k, sums + k, kLine * sizeof(float));
    }
  }
}

// For many arrays: all streams at once.
void plain_of_many(float* const* arrays, size_t ranks, size_t count) {
  for (size_t i = 0; i < count; i += kLine) {
    for (size_t k = i; k < i + kLine; k += kLanes) {
      Vector sum = add(arrays[0] + k, arrays[1] + k);
      alignas(64) float so_far[kLanes];
      for (size_t r = 2; r < ranks; ++r) {
        store(so_far, sum);
        sum = add(so_far, arrays[r] + k);
      }
      for (size_t r = 0; r < ranks; ++r) store(arrays[r] + k, sum);
    }
  }
}

// For many arrays: one block of each after another.
void blocks_of_many(float* const* arrays, size_t ranks, size_t count) {
  alignas(64) float sums[kBlock];
  for (size_t i = 0; i < count; i += kBlock) {
    for (size_t k = 0; k < kBlock; k += kLanes) store(sums + k, add(arrays[0] + i + k, arrays[1] + i + k));
    for (size_t r = 2; r < ranks; ++r) {
      for (size_t k = 0; k < kBlock; k += kLanes) store(sums + k, add(sums + k, arrays[r] + i + k));
    }
    for (size_t r = 0; r < ranks; ++r) __builtin_memcpy(arrays[r] + i, sums, sizeof(sums));
  }
}

}  // namespace

// Runs kernel `number` (0 to 3) over `count` floats, a multiple of 1024; a and b are aligned to 64 bytes.
extern "C" void limit(int number, float* a, float* b, size_t count) {
  using Kernel = void (*)(float*, float*, size_t);
  constexpr Kernel kernels[] = {plain, prefetching, streaming, blocks};
  kernels[number](a, b, count);
}

// The same for at least two arrays of `ranks` ranks, by kernel `number` (0 or 1).
extern "C" void limit_of_many(int number, float* const* arrays, size_t ranks, size_t count) {
  (number == 0 ? plain_of_many : blocks_of_many)(arrays, ranks, count);
}

// A barrier: returns when all `ranks` processes have called it. words[0] counts the processes, words[1] the barriers.
extern "C" void barrier(unsigned* words, unsigned ranks) {
  const unsigned meeting = __atomic_load_n(words + 1, __ATOMIC_ACQUIRE);
  if (__atomic_add_fetch(words, 1, __ATOMIC_ACQ_REL) == ranks) {
    __atomic_store_n(words, 0, __ATOMIC_RELAXED);
    __atomic_store_n(words + 1, meeting + 1, __ATOMIC_RELEASE);
    syscall(SYS_futex, words + 1, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    return;
  }
  while (__atomic_load_n(words + 1, __ATOMIC_ACQUIRE) == meeting) {
    syscall(SYS_futex, words + 1, FUTEX_WAIT, meeting, nullptr, nullptr, 0);
  }
}
