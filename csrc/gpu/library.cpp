#include "gpu/library.h"

#include <dlfcn.h>
#include <link.h>

namespace mykv::gpu {

Library::Library(const char* what, const std::string& name) : what_(what), path_(name) {
  handle_ = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle_ == nullptr) throw Error(what_ + " cannot be loaded: " + dlerror());
  link_map* map = nullptr;
  if (dlinfo(handle_, RTLD_DI_LINKMAP, &map) == 0 && map->l_name[0] != '\0') path_ = map->l_name;
}

bool Library::has(const char* symbol) const { return dlsym(handle_, symbol) != nullptr; }

void* Library::address(const char* symbol) const {
  void* found = dlsym(handle_, symbol);
  if (found == nullptr) throw Error(what_ + " in " + path_ + " has no " + symbol);
  return found;
}

}  // namespace mykv::gpu
