// Every parser of the core that reads what other processes or users have written, as a function of bytes: for fuzzing
// (tests/fuzz) and for the ordinary tests, which give the same bytes to the ordinary build.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace mykv::testing {

// Reads the bytes. Malformed input must raise Error, which is caught here, and accepted input must have
// the properties that its users count on, or std::logic_error is thrown.
using Parser = void (*)(const uint8_t* data, size_t bytes);

const std::map<std::string, Parser>& parsers();

}  // namespace mykv::testing
