#include "runtime/stall_watch.h"

#include <algorithm>
#include <cmath>
#include <ctime>
#include <unordered_map>
#include <unordered_set>

#include "base/error.h"

namespace mykv {

namespace {

constexpr size_t kMostNames = 5;  // in one message

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, seconds < 10 ? "%.1f s" : "%.0f s", seconds);
  return text;
}

std::string time_of_day(double seconds_ago) {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  const double then_seconds = static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9 - seconds_ago;
  const auto then = static_cast<std::time_t>(std::floor(then_seconds));
  std::tm parts{};
  localtime_r(&then, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S", &parts);
  return text;
}

// One message on operations that wait for the same ranks.
std::string sentence(const std::vector<const Waiting*>& alike, const World& world) {
  std::vector<std::string> names;
  std::unordered_set<std::string> known;
  for (const Waiting* one : alike) {
    if (known.insert(one->shown).second) names.push_back(one->shown);
  }
  std::string text;
  for (size_t k = 0; k < std::min(names.size(), kMostNames); ++k) text += (k > 0 ? ", " : "") + names[k];
  if (names.size() > kMostNames) text += " and " + std::to_string(names.size() - kMostNames) + " more";
  const double seconds = alike[0]->seconds;
  return text + (names.size() == 1 ? " has" : " have") + " waited for " + seconds_text(seconds) + " (since " +
         time_of_day(seconds) + ") for " + culprits_text(*alike[0], world);
}

std::string all_sentences(const std::vector<Waiting>& waiting, const World& world) {
  std::vector<std::vector<const Waiting*>> groups;
  for (const Waiting& one : waiting) {
    const auto same = std::find_if(groups.begin(), groups.end(), [&](const std::vector<const Waiting*>& group) {
      return group[0]->missing == one.missing && group[0]->complete == one.complete &&
             group[0]->crowded_out == one.crowded_out;
    });
    if (same == groups.end()) {
      groups.push_back({&one});
    } else {
      same->push_back(&one);
    }
  }
  std::string text;
  for (const std::vector<const Waiting*>& group : groups) text += (text.empty() ? "" : "; ") + sentence(group, world);
  return text;
}

// Advice about ranks that run and have not arrived; empty if there are none.
std::string remedy(const std::vector<Waiting>& waiting) {
  const auto has_late_ranks = [](const Waiting& one) {
    return std::any_of(one.missing.begin(), one.missing.end(),
                       [&](int rank) { return !holds(one.unresponsive, rank); });
  };
  if (std::none_of(waiting.begin(), waiting.end(), has_late_ranks)) return "";
  return ". All ranks must make the same calls, none under `if rank() == 0:`, and have the same number of batches; "
         "such waits end after MYKV_STALL_ABORT_S (1800 s by default; 0: never)";
}

// Operations of the check for circular waits (kvstore_plugin/coordination/circular_wait.py), which end when a rank
// continues.
bool is_of_watch(const Waiting& waiting) { return waiting.name.rfind("world/circle/", 0) == 0; }

// Whether this is the lowest rank of the host, not counting the rank that keeps the table locked.
bool speaks_of_lock(const TableLocked& locked, const World& world) {
  return world.local_rank() == (locked.holder == 0 ? 1 : 0);
}

}  // namespace

std::vector<StallReport> StallWatch::look(Runtime& runtime, const StallLimits& limits, double stopped) {
  std::vector<StallReport> reports;
  if (runtime.world().size() == 1 || runtime.left()) return reports;
  const double longest = runtime.longest_wait();
  if (longest < longest_ || longest == 0) {
    // The oldest operation has ended.
    if (warned_ && !aborted_)
      reports.push_back({true, "operations continue after a wait of " + seconds_text(longest_)});
    *this = {};
  }
  longest_ = longest;
  if (longest > stopped) stopped_ += stopped;  // otherwise the operation began after the stop
  if (limits.warn_seconds > 0 && counted() >= std::max(limits.warn_seconds, next_warning_)) {
    next_warning_ = 2 * std::max(limits.warn_seconds, counted());
    warn(runtime, limits.warn_seconds, &reports);
  }
  if (limits.abort_seconds > 0 && counted() >= limits.abort_seconds) abort(runtime, limits.abort_seconds, &reports);
  return reports;
}

void StallWatch::warn(Runtime& runtime, double seconds, std::vector<StallReport>* reports) {
  const World& world = runtime.world();
  try {
    std::vector<Waiting> waiting = runtime.waiting(seconds, "");
    const auto others_speak = [&](const Waiting& one) { return is_of_watch(one) || !speaks_of(one, world); };
    waiting.erase(std::remove_if(waiting.begin(), waiting.end(), others_speak), waiting.end());
    if (waiting.empty()) return;
    reports->push_back({false, all_sentences(waiting, world) + remedy(waiting)});
  } catch (const TableVerdict&) {
    return;  // the operations get that error
  } catch (const TableLocked& error) {
    if (!speaks_of_lock(error, world)) return;
    reports->push_back({false, "no operation has advanced for " + seconds_text(longest_) + ": " + error.what()});
  } catch (const Error& error) {
    reports->push_back({false, "no operation has advanced for " + seconds_text(longest_) + ": " + error.what()});
  }
  warned_ = true;
}

void StallWatch::abort(Runtime& runtime, double seconds, std::vector<StallReport>* reports) {
  const World& world = runtime.world();
  const std::string limit = " (MYKV_STALL_ABORT_S is " + seconds_text(seconds) + ")";
  std::unordered_map<std::string, Failure> given_up;
  try {
    for (const Waiting& one : runtime.waiting(seconds + stopped_, "")) {
      if (is_of_watch(one)) continue;
      const Failure reason(
          "given up after " + seconds_text(one.seconds) + " of waiting for " + culprits_text(one, world) + limit,
          ErrorCode::stalled, world.labels(culprits(one)));
      // With several hosts, rank 0 ends operations. If all ranks have arrived, only this rank can end its part. If the
      // operation is not in the table yet, the other ranks learn of it only when this rank breaks down.
      const auto names_rank_0 = [](const std::vector<int>& ranks) { return !ranks.empty() && ranks[0] == 0; };
      const bool undecidable = names_rank_0(one.unresponsive) || names_rank_0(one.unknown);
      const bool alone = one.complete || one.crowded_out;
      if (alone || (world.has_several_hosts() && undecidable)) {
        runtime.break_down(reason);
      } else if (speaks_of(one, world)) {
        given_up.emplace(one.name, reason);
      } else {
        continue;
      }
      if (!std::exchange(aborted_, true)) reports->push_back({false, one.shown + ": " + reason.text});
      if (alone) return;
    }
    if (!given_up.empty()) runtime.give_up(given_up);
  } catch (const TableVerdict&) {
    // Another rank gave the verdict, or the lock's holder has died; the runtime's thread ends all operations.
  } catch (const TableLocked& error) {
    const std::string reason = "given up after " + seconds_text(longest_) + ": " + error.what() + limit;
    runtime.give_verdict(reason);
    if (!std::exchange(aborted_, true) && speaks_of_lock(error, world)) reports->push_back({false, reason});
  } catch (const Error& error) {
    runtime.break_down(error.failure() + limit);
  }
}

}  // namespace mykv
