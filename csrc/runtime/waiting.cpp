#include "runtime/waiting.h"

#include <algorithm>
#include <iterator>

#include "world/world.h"

namespace mykv {

namespace {

constexpr size_t kMostShown = 16;  // ranks in one message

}  // namespace

bool holds(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

bool speaks_of(const Waiting& waiting, const World& world) {
  if (waiting.crowded_out) return true;  // the other ranks do not know of the operation
  const auto can_speak = [&](int rank) {
    return !holds(waiting.missing, rank) && !holds(waiting.unresponsive, rank) && !holds(waiting.unknown, rank);
  };
  const std::vector<int>& host = world.hosts()[static_cast<size_t>(world.host())];
  if (holds(waiting.unresponsive, host[0])) {
    return std::find_if(host.begin(), host.end(), can_speak) == host.begin() + world.local_rank();
  }
  int rank = 0;
  while (rank < world.size() && !can_speak(rank)) ++rank;
  return rank == world.rank();
}

std::string ranks_text(const std::vector<int>& ranks, const World& world) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  const size_t shown = std::min(ranks.size(), kMostShown);
  for (size_t k = 0; k < shown; ++k) {
    if (k > 0) text += k + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(world.label(ranks[k]));
  }
  return shown < ranks.size() ? text + " and " + std::to_string(ranks.size() - shown) + " more" : text;
}

std::vector<int> culprits(const Waiting& waiting) {
  std::vector<int> ranks = waiting.missing;
  for (const std::vector<int>* const more : {&waiting.unresponsive, &waiting.unknown}) {
    std::copy_if(more->begin(), more->end(), std::back_inserter(ranks), [&](int rank) { return !holds(ranks, rank); });
  }
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

std::string culprits_text(const Waiting& waiting, const World& world) {
  std::vector<int> late, stopped, here;
  for (int rank : waiting.missing) (holds(waiting.unresponsive, rank) ? stopped : late).push_back(rank);
  for (int rank : waiting.unresponsive) {
    if (!holds(waiting.missing, rank)) here.push_back(rank);
  }
  std::string text;
  if (waiting.crowded_out) {
    text = "a free entry in its host's table of operations (" +
           (waiting.lack.empty() ? "its share is in use" : "there is no memory for more entries: " + waiting.lack) +
           ")";
  }
  const auto add = [&](const std::vector<int>& ranks, const char* one, const char* several) {
    if (ranks.empty()) return;
    text += (text.empty()          ? ""
             : waiting.crowded_out ? ", and so for "
                                   : ", and ") +
            ranks_text(ranks, world) + (ranks.size() == 1 ? one : several);
  };
  add(late, ", which has not come", ", which have not come");
  add(stopped, ", which has not come and does not respond (is it stopped?)",
      ", which have not come and do not respond (are they stopped?)");
  add(here, ", which does not respond (is it stopped?)", ", which do not respond (are they stopped?)");
  add(waiting.unknown, ", whose host does not answer", ", whose hosts do not answer");
  return text.empty() ? "the result, though all ranks have come and respond" : text;
}

}  // namespace mykv
