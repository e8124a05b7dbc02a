// One of the core's parsers under libFuzzer; run.py compiles this once for each and sets MYKV_PARSER.
#include "kernels/kernels.h"
#include "testing/parsers.h"

// The kernels read nothing that is foreign, and take long to compile: compressors only ask which ones are in use.
const char* mykv::kernel_path() { return __builtin_cpu_supports("avx2") ? "avx2" : "generic"; }

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  static const mykv::testing::Parser parser = mykv::testing::parsers().at(MYKV_PARSER);
  parser(data, bytes);
  return 0;
}
