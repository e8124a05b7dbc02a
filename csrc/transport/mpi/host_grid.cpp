#include "transport/mpi/host_grid.h"

#include <cmath>

namespace mykv {

HostGrid HostGrid::square(size_t hosts) {
  return {hosts, static_cast<size_t>(std::lround(std::sqrt(static_cast<double>(hosts))))};
}

}  // namespace mykv
