// For whom a rank waits, in an operation under way.
#pragma once

#include <string>
#include <vector>

namespace mykv {

class World;

struct Waiting {
  std::string name;
  double seconds = 0;             // since this rank has arrived
  bool complete = false;          // all ranks have arrived, but there is no result
  bool crowded_out = false;       // it has not arrived: its host's table is full; `missing` is of what is in there
  std::vector<int> missing;       // ranks that have not arrived
  std::vector<int> unresponsive;  // ranks, of all, that were not seen for some seconds
  std::vector<int> unknown;       // ranks of hosts that do not answer
};

// Whether this rank is to speak of it: the lowest rank that waits and responds, and the lowest such rank of a host
// whose first rank does not answer for it.
bool speaks_of(const Waiting& waiting, const World& world);

// 'rank 3', 'ranks 1, 2 and 5', as messages call them; shortened where there are many.
std::string ranks_text(const std::vector<int>& ranks, const World& world);

// 'rank 1, which has not come and does not respond (is it stopped?)': for whom an operation waits.
std::string culprits_text(const Waiting& waiting, const World& world);

}  // namespace mykv
