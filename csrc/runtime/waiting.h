// Which ranks a rank waits for, in an operation under way, and how messages say it.
#pragma once

#include <string>
#include <vector>

namespace mykv {

class World;

struct Waiting {
  std::string name;
  std::string shown;              // the name in messages
  double seconds = 0;             // since this rank has arrived
  bool complete = false;          // all ranks have arrived, but there is no result
  std::string lack;               // with crowded_out: the memory that is short, if that is why
  bool crowded_out = false;       // this rank has not arrived: its host's table is full; see `missing`
  std::vector<int> missing;       // ranks that have not arrived; if crowded_out, at operations in the table
  std::vector<int> unresponsive;  // of all ranks, those not seen for some seconds
  std::vector<int> unknown;       // ranks of hosts that do not answer
};

// Whether a rank is among `ranks`.
bool holds(const std::vector<int>& ranks, int rank);

// Whether this rank reports the operation: the lowest rank that waits and responds does; so does the lowest such rank
// of a host whose first rank does not respond.
bool speaks_of(const Waiting& waiting, const World& world);

// 'rank 3', 'ranks 1, 2 and 5', with the labels of the ranks; shortened if there are many.
std::string ranks_text(const std::vector<int>& ranks, const World& world);

// The ranks that an operation waits for.
std::vector<int> culprits(const Waiting& waiting);

// 'rank 1, which has not come and does not respond (is it stopped?)': what culprits() are, and what is wrong with them.
std::string culprits_text(const Waiting& waiting, const World& world);

}  // namespace mykv
