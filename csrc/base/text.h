// Texts are UTF-8: Python, MXNet and timeline viewers reject anything else.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace mykv {

// The longest prefix of at most `most` bytes that does not cut a character.
std::string_view beginning(std::string_view text, size_t most);
// Copies as much of a text as fits, zero-terminated; never cuts a character.
void set_text(char* to, size_t capacity, std::string_view text);
// The same text, with U+FFFD for each invalid byte: a library's message may be in any encoding.
std::string readable(std::string_view text);

}  // namespace mykv
