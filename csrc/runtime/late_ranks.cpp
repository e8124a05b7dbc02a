#include "runtime/late_ranks.h"

#include <algorithm>
#include <iterator>
#include <tuple>

#include "base/clock.h"
#include "base/error.h"
#include "operations/signature.h"

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
  const std::vector<int>& host = world.host_ranks();
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
  add(late, ", which has not arrived", ", which have not arrived");
  add(stopped, ", which has not arrived and does not respond (is it stopped?)",
      ", which have not arrived and do not respond (are they stopped?)");
  add(here, ", which does not respond (is it stopped?)", ", which do not respond (are they stopped?)");
  add(waiting.unknown, ", whose host does not answer", ", whose hosts do not answer");
  return text.empty() ? "the result, though all ranks have arrived and respond" : text;
}

namespace {

constexpr size_t kMostAsked = 1024;  // operations in one question

void add_all(std::vector<int>* to, const std::vector<int>& ranks) {
  for (int rank : ranks) {
    if (!holds(*to, rank)) to->push_back(rank);
  }
  std::sort(to->begin(), to->end());
}

std::vector<int> ranks_of(const std::vector<int>& host, const std::vector<int>& local_ranks) {
  std::vector<int> ranks;
  for (int r : local_ranks) ranks.push_back(host[static_cast<size_t>(r)]);
  return ranks;
}

}  // namespace

double LateRanks::longest_wait() {
  const int64_t now = coarse_now_ns();
  return static_cast<double>(std::max(now - requests_.oldest(now), table_.lock().longest_wait())) * 1e-9;
}

std::vector<Waiting> LateRanks::waiting(double least_seconds, const std::string& name) {
  std::vector<Waiting> result = waiting_here(least_seconds, name);
  Waiting one;
  one.crowded_out = true;
  one.lack = table_.lack_of_memory().text;
  int64_t since;
  std::tie(one.name, since) = requests_.crowded_out();
  one.shown = shown_name(one.name);
  one.seconds = static_cast<double>(coarse_now_ns() - since) * 1e-9;
  if (since == 0 || one.seconds < least_seconds || (!name.empty() && one.name != name)) return result;
  const std::vector<int>& host = world_.host_ranks();
  one.missing = ranks_of(host, table_.behind());
  one.unresponsive = ranks_of(host, table_.unresponsive());
  for (const Waiting& other : result) {
    add_all(&one.missing, other.missing);
    add_all(&one.unresponsive, other.unresponsive);
    add_all(&one.unknown, other.unknown);
  }
  result.push_back(std::move(one));
  return result;
}

std::vector<Waiting> LateRanks::waiting_here(double least_seconds, const std::string& name) {
  int64_t now;
  const std::vector<Part> parts = requests_.waiting(least_seconds, name, &now);

  const std::vector<int>& host = world_.host_ranks();
  const std::vector<int> unresponsive = ranks_of(host, table_.unresponsive());
  const bool asks = world_.has_several_hosts();
  if (parts.empty())
    (void)table_.operation_state(
        Key{});  // throws if a rank keeps the lock: threads may wait for the lock before they arrive
  std::vector<Waiting> result;
  std::vector<Key> asked;         // keys to ask about
  std::vector<size_t> asked_for;  // for each key, its index in the result
  for (const Part& part : parts) {
    const OperationState operation_state = table_.operation_state(part.key);
    if (!operation_state.waiting) continue;
    Waiting& one = result.emplace_back();
    one.name = part.posted->request.name;
    one.shown = shown_name(one.name, part.posted->request.signature);
    one.seconds = static_cast<double>(now - part.since) * 1e-9;
    one.missing = ranks_of(host, operation_state.missing);
    one.unresponsive = unresponsive;
    one.complete = operation_state.state == State::ready || operation_state.state == State::taken;
    if (asks) {
      asked.push_back(part.key);
      asked_for.push_back(result.size() - 1);
    }
  }
  if (asked.empty()) return result;

  add_other_hosts(asked, asked_for, &result);
  // Operations may have advanced meanwhile.
  for (size_t k = asked.size(); k-- > 0;) {
    const OperationState operation_state = table_.operation_state(asked[k]);
    Waiting& one = result[asked_for[k]];
    if (!operation_state.waiting) {
      result.erase(result.begin() + static_cast<std::ptrdiff_t>(asked_for[k]));
    } else if (operation_state.state == State::ready) {
      one.missing.clear();
      one.complete = true;
    }
  }
  return result;
}

// Adds the answers of the other hosts. `asked_for`: for each key, its index in the result.
void LateRanks::add_other_hosts(const std::vector<Key>& asked, const std::vector<size_t>& asked_for,
                                std::vector<Waiting>* result) {
  std::vector<bool> answered(world_.hosts().size());
  answered[static_cast<size_t>(world_.host())] = true;
  std::vector<int> elsewhere, unknown;
  for (size_t first = 0; first < asked.size(); first += kMostAsked) {
    const size_t last = std::min(asked.size(), first + kMostAsked);
    const std::vector<Inquiry::Answer> answers = commands_.ask_hosts({asked.begin() + first, asked.begin() + last});
    for (const Inquiry::Answer& answer : answers) {
      answered[static_cast<size_t>(answer.host)] = true;
      add_all(&elsewhere, answer.unresponsive);
      for (size_t k = 0; k < std::min(last - first, answer.missing.size()); ++k) {
        Waiting& one = (*result)[asked_for[first + k]];
        // If all ranks have arrived, a host may have finished the operation already.
        if (!one.complete) add_all(&one.missing, answer.missing[k]);
      }
    }
    if (answers.size() + 1 < world_.hosts().size()) break;  // a host does not answer: do not wait for it again
  }
  for (size_t h = 0; h < answered.size(); ++h) {
    if (!answered[h]) add_all(&unknown, world_.hosts()[h]);
  }
  for (Waiting& one : *result) {
    add_all(&one.unresponsive, elsewhere);
    add_all(&one.unknown, unknown);
  }
}

std::vector<std::vector<int>> LateRanks::waiting_for_this(const std::vector<std::string>& names,
                                                          const std::string& turn_of) {
  const std::vector<Key> keys = turns_.next_keys(names, turn_of);
  std::vector<std::vector<int>> come(names.size());
  const auto add_others = [&](std::vector<int>* to, const std::vector<int>& host, const std::vector<int>& missing) {
    for (int rank : host) {
      if (!holds(missing, rank)) to->push_back(rank);
    }
    std::sort(to->begin(), to->end());
  };
  const std::vector<int>& host = world_.host_ranks();
  try {
    for (size_t k = 0; k < keys.size(); ++k) {
      const OperationState operation_state = table_.operation_state(keys[k]);
      if (!operation_state.found) continue;
      std::vector<int> absent = ranks_of(host, operation_state.missing);
      add_all(&absent, ranks_of(host, operation_state.through));
      add_others(&come[k], host, absent);
    }
  } catch (const Error&) {
    // The table is locked: nothing is known about this host. The caller's own operations report the lock.
  }
  if (!world_.has_several_hosts()) return come;
  for (size_t first = 0; first < keys.size(); first += kMostAsked) {
    const size_t last = std::min(keys.size(), first + kMostAsked);
    for (const Inquiry::Answer& answer : commands_.ask_hosts({keys.begin() + first, keys.begin() + last})) {
      for (size_t k = 0; k < std::min(last - first, answer.missing.size()); ++k) {
        std::vector<int> absent = answer.missing[k];
        add_all(&absent, answer.through[k]);
        add_others(&come[first + k], world_.hosts()[static_cast<size_t>(answer.host)], absent);
      }
    }
  }
  return come;
}

}  // namespace mykv
