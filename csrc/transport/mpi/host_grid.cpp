#include "transport/mpi/host_grid.h"

#include <cmath>

namespace mykv {

HostGrid HostGrid::square(size_t hosts) {
  const auto most_square = static_cast<size_t>(std::lround(std::sqrt(static_cast<double>(hosts))));
  for (size_t off = 0; off <= most_square / 3; ++off) {
    if (hosts % (most_square - off) == 0) return {hosts, most_square - off};
    if (hosts % (most_square + off) == 0) return {hosts, most_square + off};
  }
  return {hosts, most_square};
}

}  // namespace mykv
