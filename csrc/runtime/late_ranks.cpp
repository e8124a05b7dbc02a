// Runtime: which ranks its operations wait for. The host's table knows this about its own ranks. The other hosts are
// asked only on demand, so that an operation that does not wait costs no more than a look at a coarse clock.
#include "runtime/late_ranks.h"

#include <algorithm>
#include <map>

#include "base/clock.h"
#include "base/error.h"
#include "runtime/runtime.h"

namespace mykv {

namespace {

constexpr auto kAnswerPatience = std::chrono::seconds(3);  // for hosts that are asked
constexpr int64_t kLockPatienceUs = 1000000;               // for the table's lock, of a rank that breaks off
constexpr size_t kMostAsked = 1024;                        // operations in one question
constexpr size_t kMostShown = 16;                          // ranks in one message

bool holds(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

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
  add_all(&ranks, waiting.unresponsive);
  add_all(&ranks, waiting.unknown);
  return ranks;
}

std::string culprits_text(const Waiting& waiting, const World& world) {
  std::vector<int> late, stopped, here;
  for (int rank : waiting.missing) (holds(waiting.unresponsive, rank) ? stopped : late).push_back(rank);
  for (int rank : waiting.unresponsive) {
    if (!holds(waiting.missing, rank)) here.push_back(rank);
  }
  std::string text;
  if (waiting.crowded_out) text = "a place in its host's table of operations, of which it has its share";
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

double Runtime::longest_wait() {
  std::lock_guard<std::mutex> lock(mutex_);
  const int64_t now = coarse_now_ns();
  int64_t first = now;
  for (const auto& [entry, part] : parts_) first = std::min(first, part.since);
  if (crowded_out_since_ != 0) first = std::min(first, crowded_out_since_);
  return static_cast<double>(std::max(now - first, table_.lock().longest_wait())) * 1e-9;
}

std::vector<Waiting> Runtime::waiting(double least_seconds, const std::string& name) {
  std::vector<Waiting> result = waiting_here(least_seconds, name);
  Waiting one;
  one.crowded_out = true;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    one.name = crowded_out_;
    one.seconds = static_cast<double>(coarse_now_ns() - crowded_out_since_) * 1e-9;
    if (crowded_out_since_ == 0 || one.seconds < least_seconds || (!name.empty() && one.name != name)) return result;
  }
  const std::vector<int>& host = world_.hosts()[static_cast<size_t>(world_.host())];
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

std::vector<Waiting> Runtime::waiting_here(double least_seconds, const std::string& name) {
  // The oldest part of each request.
  std::map<const RequestState*, Part> oldest;
  int64_t now;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    now = coarse_now_ns();
    for (const auto& [entry, part] : parts_) {
      if (!name.empty() && part.posted->request.name != name) continue;
      if (static_cast<double>(now - part.since) * 1e-9 < least_seconds) continue;
      const auto [it, is_new] = oldest.emplace(part.posted.get(), part);
      if (!is_new && part.since < it->second.since) it->second = part;
    }
  }
  std::vector<Part> parts;
  for (auto& [posted, part] : oldest) parts.push_back(std::move(part));
  std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.since < b.since; });

  const std::vector<int>& host = world_.hosts()[static_cast<size_t>(world_.host())];
  const std::vector<int> unresponsive = ranks_of(host, table_.unresponsive());
  const bool asks = world_.hosts().size() > 1;
  if (parts.empty())
    (void)table_.operation_state(Key{});  // throws if the lock is stuck: threads may wait for it before they arrive
  std::vector<Waiting> result;
  std::vector<Key> asked;         // about these ...
  std::vector<size_t> asked_for;  // ... which are these of the result
  for (const Part& part : parts) {
    const OperationState operation_state = table_.operation_state(part.key);
    if (!operation_state.waiting) continue;
    Waiting& one = result.emplace_back();
    one.name = part.posted->request.name;
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

  std::vector<bool> answered(world_.hosts().size());
  answered[static_cast<size_t>(world_.host())] = true;
  std::vector<int> elsewhere, unknown;
  for (size_t first = 0; first < asked.size(); first += kMostAsked) {
    const size_t last = std::min(asked.size(), first + kMostAsked);
    const std::vector<Inquiry::Answer> answers = ask_hosts({asked.begin() + first, asked.begin() + last});
    for (const Inquiry::Answer& answer : answers) {
      answered[static_cast<size_t>(answer.host)] = true;
      add_all(&elsewhere, answer.unresponsive);
      for (size_t k = 0; k < std::min(last - first, answer.missing.size()); ++k) {
        Waiting& one = result[asked_for[first + k]];
        // If all ranks have arrived, a host may have finished the operation already.
        if (!one.complete) add_all(&one.missing, answer.missing[k]);
      }
    }
    if (answers.size() + 1 < world_.hosts().size()) break;  // a host does not answer: do not wait for it again
  }
  for (size_t h = 0; h < answered.size(); ++h) {
    if (!answered[h]) add_all(&unknown, world_.hosts()[h]);
  }
  for (Waiting& one : result) {
    add_all(&one.unresponsive, elsewhere);
    add_all(&one.unknown, unknown);
  }
  // Operations may have gone on meanwhile.
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

std::vector<std::vector<int>> Runtime::waiting_for_this(const std::vector<std::string>& names,
                                                        const std::string& turn_of) {
  std::vector<Key> keys;
  {
    std::lock_guard<std::mutex> lock(turns_mutex_);
    for (const std::string& name : names) {
      const auto turn = turns_.find(turn_of.empty() ? name : turn_of);
      const uint64_t taken = turn == turns_.end() ? 0 : turn->second;
      keys.push_back(make_key(name, turn_of.empty() || taken == 0 ? taken : taken - 1, 0));
    }
  }
  std::vector<std::vector<int>> come(names.size());
  const auto add_others = [&](std::vector<int>* to, const std::vector<int>& host, const std::vector<int>& missing) {
    for (int rank : host) {
      if (!holds(missing, rank)) to->push_back(rank);
    }
    std::sort(to->begin(), to->end());
  };
  const std::vector<int>& host = world_.hosts()[static_cast<size_t>(world_.host())];
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
  if (world_.hosts().size() == 1) return come;
  for (size_t first = 0; first < keys.size(); first += kMostAsked) {
    const size_t last = std::min(keys.size(), first + kMostAsked);
    for (const Inquiry::Answer& answer : ask_hosts({keys.begin() + first, keys.begin() + last})) {
      for (size_t k = 0; k < std::min(last - first, answer.missing.size()); ++k) {
        std::vector<int> absent = answer.missing[k];
        add_all(&absent, answer.through[k]);
        add_others(&come[first + k], world_.hosts()[static_cast<size_t>(answer.host)], absent);
      }
    }
  }
  return come;
}

std::vector<Inquiry::Answer> Runtime::ask_hosts(const std::vector<Key>& keys) {
  std::lock_guard<std::mutex> asking(asking_mutex_);
  const auto question = std::make_shared<Question>();
  question->keys = keys;
  std::unique_lock<std::mutex> lock(mutex_);
  if (!stopped_.empty()) return {};
  question_ = question;
  wished_.store(true, std::memory_order_release);
  table_.bell(world_.local_rank()).ring();
  answered_.wait_for(lock, kAnswerPatience, [&] { return question->answers.size() + 1 == world_.hosts().size(); });
  question_.reset();
  return std::move(question->answers);
}

void Runtime::give_up(const std::unordered_map<std::string, Cause>& reasons) {
  std::vector<std::pair<Key, Cause>> keys;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [entry, part] : parts_) {
      const auto found = reasons.find(part.posted->request.name);
      if (found != reasons.end()) keys.emplace_back(part.key, found->second);
    }
    if (world_.hosts().size() > 1) {
      to_give_up_.insert(to_give_up_.end(), keys.begin(), keys.end());
      wished_.store(true, std::memory_order_release);
    }
  }
  if (world_.hosts().size() > 1) {
    table_.bell(world_.local_rank()).ring();
  } else {
    for (const auto& [key, reason] : keys) table_.give_up(key, reason, false);
  }
}

void Runtime::break_off(const Cause& reason) {
  table_.lock().lose_patience(kLockPatienceUs,
                              "rank " + std::to_string(world_.label(world_.rank())) + " has left: " + reason.text);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (break_off_.empty() || !lost_.load())
      break_off_ = reason;  // the loss of a process is the cause of later failures
    wished_.store(true, std::memory_order_release);
  }
  table_.bell(world_.local_rank()).ring();
}

void Runtime::give_up_table(const std::string& reason) { table_.lock().give_up(reason); }

void Runtime::lose(const Cause& reason) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    break_off_ = reason;
    lost_.store(true);
  }
  break_off(reason);
}

// Runs what other threads have asked of the runtime's thread.
bool Runtime::take_wishes() {
  std::deque<std::pair<Key, Cause>> to_give_up;
  std::shared_ptr<Question> question;
  bool ask;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!break_off_.empty()) throw Error(break_off_);
    to_give_up.swap(to_give_up_);
    question = question_;
    ask = question && !std::exchange(question->asked, true);
  }
  // Not under mutex_: arrive() takes mutex_ under the table's lock, which rank 0 may need here.
  for (const auto& [key, reason] : to_give_up) agreement_.give_up(key, reason);
  if (ask) inquiry_.ask(question->keys);
  agreement_.progress_sending();
  inquiry_.progress();
  std::vector<Inquiry::Answer> answers;
  if (question) answers = inquiry_.take_answers();
  std::lock_guard<std::mutex> lock(mutex_);
  for (Inquiry::Answer& answer : answers) question->answers.push_back(std::move(answer));
  if (!answers.empty()) answered_.notify_all();
  if (!question_ && to_give_up_.empty() && break_off_.empty() && !agreement_.sending() && !inquiry_.sending()) {
    wished_.store(false, std::memory_order_release);
  }
  return ask || !to_give_up.empty() || !answers.empty();
}

}  // namespace mykv
