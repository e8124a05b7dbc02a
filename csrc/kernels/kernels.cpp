// Chooses the instruction set once, and handles the cases that need no kernel.
#include "kernels/kernels.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "kernels/instruction_set.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace mykv {
namespace {

#if defined(__x86_64__)

bool cpu_has_f16c() {  // __builtin_cpu_supports knows this name only since GCC 11
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

bool cpu_has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && cpu_has_f16c(); }

bool cpu_has_avx512() {
  return cpu_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

#else

bool cpu_has_avx2() { return false; }
bool cpu_has_avx512() { return false; }

#endif

struct Candidate {
  const KernelPath* (*get)();
  bool (*runs_here)();
};

constexpr Candidate kCandidates[] = {
    // best first
    {avx512_kernels, cpu_has_avx512},
    {avx2_kernels, cpu_has_avx2},
    {generic_kernels, [] { return true; }},
};

const KernelPath* best_path() {
  for (const Candidate& candidate : kCandidates) {
    if (candidate.get() != nullptr && candidate.runs_here()) return candidate.get();
  }
  return generic_kernels();
}

std::atomic<const KernelPath*>& chosen_path() {
  static std::atomic<const KernelPath*> path{best_path()};
  return path;
}

}  // namespace

const KernelPath& kernels_in_use() { return *chosen_path().load(std::memory_order_relaxed); }

void reduce(DType dtype, ReduceOp op, const void* const* inputs, int n_inputs, void* const* outputs, int n_outputs,
            size_t count, double scale) {
  const size_t bytes = count * item_size(dtype);
  if (bytes == 0 || n_outputs == 0) return;
  if (n_inputs == 1 && (scale == 1 || dtype == DType::bool8)) {
    for (int k = 0; k < n_outputs; ++k) copy(outputs[k], inputs[0], bytes);
    return;
  }
  const DefaultFloatMode mode;
  kernels_in_use().reduce({dtype, op, reinterpret_cast<const char* const*>(inputs), n_inputs,
                           reinterpret_cast<char* const*>(outputs), n_outputs, bytes, scale});
}

void copy(void* dst, const void* src, size_t bytes) {
  if (dst != src && bytes != 0) std::memcpy(dst, src, bytes);
}

void convert(DType to, void* dst, DType from, const void* src, size_t count) {
  const KernelPath& path = kernels_in_use();
  auto* out = static_cast<char*>(dst);
  const auto* in = static_cast<const char*>(src);
  const DefaultFloatMode mode;
  if (to != DType::float64 && from != DType::float64) {
    path.convert({to, from, out, in, count});
    return;
  }
  constexpr size_t kBlock = 1024;
  float floats[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t some = std::min(kBlock, count - begin);
    if (to == DType::float64) {
      path.convert({DType::float32, from, reinterpret_cast<char*>(floats), in + begin * item_size(from), some});
      std::copy_n(floats, some, reinterpret_cast<double*>(out) + begin);
    } else {
      const double* doubles = reinterpret_cast<const double*>(in) + begin;
      std::transform(doubles, doubles + some, floats, [](double value) { return static_cast<float>(value); });
      path.convert({to, DType::float32, out + begin * item_size(to), reinterpret_cast<const char*>(floats), some});
    }
  }
}

const char* kernel_path() { return kernels_in_use().name; }

std::vector<const char*> kernel_paths_built() {
  std::vector<const char*> names;
  for (const Candidate& candidate : kCandidates) {
    if (candidate.get() != nullptr) names.push_back(candidate.get()->name);
  }
  return names;
}

bool select_kernel_path(const char* name) {
  const bool best = std::strcmp(name, "best") == 0;
  for (const Candidate& candidate : kCandidates) {
    const KernelPath* path = candidate.get();
    if (path != nullptr && (best || std::strcmp(path->name, name) == 0) && candidate.runs_here()) {
      chosen_path().store(path, std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}

namespace {

double sum_of_narrow(const KernelPath& path, DType dtype, const char* data, size_t count) {
  constexpr size_t kBlock = 1024;
  float values[kBlock];
  double total = 0;
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t some = std::min(kBlock, count - begin);
    convert(DType::float32, values, dtype, data + begin * item_size(dtype), some);
    total += path.squares({DType::float32, reinterpret_cast<const char*>(values), some});
  }
  return total;
}

}  // namespace

bool has_squares(DType dtype) {
  return dtype == DType::float16 || dtype == DType::bfloat16 || dtype == DType::float32 || dtype == DType::float64;
}

double sum_of_squares(DType dtype, const void* data, size_t count) {
  const KernelPath& path = kernels_in_use();
  const auto* values = static_cast<const char*>(data);
  const DefaultFloatMode mode;
  const bool narrow = dtype != DType::float32 && dtype != DType::float64;
  return narrow ? sum_of_narrow(path, dtype, values, count) : path.squares({dtype, values, count});
}

}  // namespace mykv
