// Shared mappings that a forked child gets as private ones: nothing that the child writes reaches another process.
#pragma once

#include <cstddef>

namespace mykv {

// From now on a fork of this process maps the range anew, privately. What the child has not written itself shows what
// the other processes write. It costs a fork one system call for each range, whatever its size. `fd`: the descriptor
// that is mapped there, from its beginning; it is open as long as the range.
void private_in_forks(char* base, size_t bytes, int fd);
// Call this before the range is unmapped.
void no_longer_private_in_forks(const char* base);

}  // namespace mykv
