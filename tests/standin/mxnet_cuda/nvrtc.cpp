// Stand-in for libnvrtc: takes any source and compiles nothing (driver.cpp has the kernels).
#include <cstddef>

#include "../standin.h"

namespace {

int place;

}  // namespace

STANDIN_API int nvrtcCreateProgram(void** program, ...) {
  *program = &place;
  return 0;
}
STANDIN_API int nvrtcDestroyProgram(void**) { return 0; }
STANDIN_API int nvrtcAddNameExpression(void*, const char*) { return 0; }
STANDIN_API int nvrtcCompileProgram(void*, int, const char**) { return 0; }
STANDIN_API const char* nvrtcGetErrorString(int) { return "an error of the stand-in for libnvrtc"; }
STANDIN_API int nvrtcGetLoweredName(void*, const char* name, const char** lowered) {
  *lowered = name;
  return 0;
}
STANDIN_API int nvrtcGetPTXSize(void*, size_t* bytes) {
  *bytes = 1;
  return 0;
}
STANDIN_API int nvrtcGetPTX(void*, char* text) {
  *text = 0;
  return 0;
}
STANDIN_API int nvrtcGetProgramLogSize(void*, size_t* bytes) {
  *bytes = 1;
  return 0;
}
STANDIN_API int nvrtcGetProgramLog(void*, char* text) {
  *text = 0;
  return 0;
}
