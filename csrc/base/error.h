// The exception type of the core. Its text is a sentence for the user.
#pragma once

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace mykv {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline Error system_error(const std::string& what) { return Error(what + ": " + std::strerror(errno)); }

}  // namespace mykv
