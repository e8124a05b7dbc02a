// A library that is found at run time, so that one binary serves machines with and without it. It is never unloaded.
#pragma once

#include <string>

#include "base/error.h"

namespace mykv::gpu {

class Library {
 public:
  // `name`: a path, or a name that the loader searches for; `what`: its name in messages. Throws Error if it does not
  // load.
  Library(const char* what, const std::string& name);

  bool has(const char* symbol) const;
  const std::string& path() const { return path_; }

  // Throws Error when the library lacks the symbol.
  template <class Function>
  void find(const char* symbol, Function** function) const {
    *function = reinterpret_cast<Function*>(address(symbol));
  }

 private:
  void* address(const char* symbol) const;

  std::string what_;
  std::string path_;
  void* handle_ = nullptr;
};

}  // namespace mykv::gpu
