// Texts are UTF-8: Python, MXNet and the readers of a timeline refuse what is not.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace mykv {

// The longest beginning of at most `most` bytes that ends with a whole character.
std::string_view beginning(std::string_view text, size_t most);
// Copies what fits of a text, and a zero behind it; never a part of a character.
void set_text(char* to, size_t capacity, std::string_view text);
// The same text, with U+FFFD in place of each byte that belongs to no character: a library's message may be in any
// encoding.
std::string readable(std::string_view text);

}  // namespace mykv
