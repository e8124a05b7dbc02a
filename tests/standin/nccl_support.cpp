// What the stand-in for libnccl stands on: the other stand-in, counters, planted failures, the last error.
#include <dlfcn.h>
#include <link.h>

#include <cstdarg>

#include "nccl.h"

namespace standin {
namespace {

std::mutex lock;  // of all below
std::map<std::string, long>& calls = *new std::map<std::string, long>;
std::vector<Plant>& plants = *new std::vector<Plant>(planted("STANDIN_NCCL_PLANT"));
std::string& error_text = *new std::string;
std::atomic<unsigned long> resumed{0};

// The stand-in for libcudart may have been loaded with RTLD_LOCAL, where RTLD_DEFAULT does not find it.
void* find_cuda() {
  if (dlsym(RTLD_DEFAULT, "standin_enqueue")) return RTLD_DEFAULT;
  std::vector<std::string> loaded;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* names) {
        static_cast<std::vector<std::string>*>(names)->push_back(info->dlpi_name);
        return 0;
      },
      &loaded);
  for (const std::string& name : loaded) {
    if (name.empty()) continue;
    void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (library && dlsym(library, "standin_enqueue")) return library;
    if (library) dlclose(library);
  }
  const char* file = std::getenv("STANDIN_CUDART");
  void* library = dlopen(file ? file : "libcudart.so.12", RTLD_NOW);
  if (!library || !dlsym(library, "standin_enqueue")) {
    std::fprintf(stderr, "stand-in for libnccl: there is no stand-in for libcudart (STANDIN_CUDART)\n");
    std::abort();
  }
  return library;
}

template <class Function>
void find(void* library, Function& function, const char* name) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (!function) std::abort();
}

}  // namespace

const Cuda& cuda() {
  static const Cuda found = [] {
    void* library = find_cuda();
    Cuda functions;
    find(library, functions.enqueue, "standin_enqueue");
    find(library, functions.order, "standin_order");
    find(library, functions.alias, "standin_alias");
    find(library, functions.device_of, "standin_device_of");
    find(library, functions.extent, "standin_extent");
    find(library, functions.stream_device, "standin_stream_device");
    find(library, functions.current_device, "standin_current_device");
    find(library, functions.bus_id, "standin_bus_id");
    find(library, functions.device_error, "standin_device_error");
    find(library, functions.violate, "standin_violate");
    return functions;
  }();
  return found;
}

int failed(int code, const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  std::lock_guard<std::mutex> guard(lock);
  error_text = text;
  return code;
}

int plant_of(const char* function) {
  std::lock_guard<std::mutex> guard(lock);
  long call = ++calls[function];
  for (const Plant& plant : plants)
    if (plant.function == function && plant.nth == call) return plant.code;
  return kSuccess;
}

int entered(const char* function) {
  int code = plant_of(function);
  return code == kSuccess ? code : failed(code, "%s : planted failure", function);
}

unsigned long hangs_resumed() { return resumed; }

}  // namespace standin

using namespace standin;

STANDIN_API const char* ncclGetLastError(void*) {
  static thread_local std::string kept;
  std::lock_guard<std::mutex> guard(lock);
  kept = error_text;
  return kept.c_str();
}

STANDIN_API void standin_nccl_plant(const char* function, int nth, int code) {
  std::lock_guard<std::mutex> guard(lock);
  plants.push_back({function, calls[function] + nth, code, false});
}

STANDIN_API void standin_nccl_resume(void) { ++resumed; }

STANDIN_API long standin_nccl_calls(const char* function) {
  std::lock_guard<std::mutex> guard(lock);
  return calls[function];
}
