#include "world/thread_host.h"

#include <string>
#include <vector>

#include "table/host_table.h"

namespace mykv {

ThreadHost::ThreadHost(int size, size_t region_bytes, size_t table_capacity)
    : size_(size), region_bytes_(region_bytes) {
  std::string refused;
  segment_ = Segment::create(HostTable::bytes(size) + region_bytes * static_cast<size_t>(size), &refused);
  std::vector<int> ranks;
  for (int r = 0; r < size; ++r) ranks.push_back(r);
  HostTable(segment_, ranks, 0, table_capacity, false);
}

}  // namespace mykv
