// Whether this process is a fork of the process that made an object; costs no system call, as getpid() does.
#pragma once

#include <cstdint>

namespace mykv {

// Differs between a process and its forks, which share all that was made before the fork.
uint32_t fork_number();

}  // namespace mykv
