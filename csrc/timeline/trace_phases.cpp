#include "timeline/trace_phases.h"

#include <algorithm>
#include <array>

namespace mykv {

namespace {

constexpr size_t kPhases = 6;
constexpr int64_t kShortest = 100;  // ns; shorter pieces are not shown

// All phases of all parts, which overlap.
std::vector<PhasePiece> collect(const RequestRecord& request) {
  std::vector<PhasePiece> all;
  all.reserve(request.parts.size() * 5);
  for (size_t i = 0; i < request.parts.size(); ++i) {
    const auto add = [&](Phase phase, const PartRecord::Interval& interval) {
      if (interval.begin == 0) return;
      const int64_t begin = std::max(interval.begin, request.begin);
      const int64_t end = std::min(interval.end, request.end);
      if (begin < end) all.push_back({phase, i, begin, end});
    };
    const PartRecord& part = request.parts[i];
    add(Phase::copy_in, part.copy_in);
    add(Phase::wait, part.wait);
    add(Phase::reduce, part.reduce);
    add(Phase::network, part.scatter);
    add(Phase::reduce, part.reduce_all);
    add(Phase::network, part.gather);
    add(Phase::spread, part.spread);
    add(Phase::copy_out, part.copy_out);
  }
  return all;
}

// The phases of a part follow each other. Corrects overlaps, which come from clocks and late readers.
void in_sequence(std::vector<PhasePiece>* pieces) {
  int64_t last = 0;
  for (PhasePiece& piece : *pieces) {
    piece.begin = std::max(piece.begin, last);
    last = std::max(last, piece.end);
  }
  pieces->erase(std::remove_if(pieces->begin(), pieces->end(),
                               [](const PhasePiece& piece) { return piece.end - piece.begin < kShortest; }),
                pieces->end());
}

}  // namespace

const char* phase_name(Phase phase) {
  constexpr const char* kNames[kPhases] = {"copy in", "copy out", "reduce", "spread", "network", "wait"};
  return kNames[static_cast<size_t>(phase)];
}

std::vector<PhasePiece> phases_of(const RequestRecord& request) {
  struct Edge {
    int64_t time;
    size_t piece;
    bool opens;
  };
  std::vector<PhasePiece> all = collect(request);
  if (request.parts.size() <= 1) {
    in_sequence(&all);
    return all;
  }
  std::vector<Edge> edges;
  edges.reserve(all.size() * 2);
  for (size_t i = 0; i < all.size(); ++i) {
    edges.push_back({all[i].begin, i, true});
    edges.push_back({all[i].end, i, false});
  }
  std::sort(edges.begin(), edges.end(), [](const Edge& a, const Edge& b) { return a.time < b.time; });

  std::vector<PhasePiece> shown;
  std::array<std::vector<size_t>, kPhases> open;  // pieces of each phase
  constexpr size_t kNobody = SIZE_MAX;
  size_t winner = kNobody;
  int64_t since = 0;
  for (const Edge& edge : edges) {
    std::vector<size_t>& same = open[static_cast<size_t>(all[edge.piece].phase)];
    if (edge.opens) {
      same.push_back(edge.piece);
    } else {
      same.erase(std::find(same.begin(), same.end(), edge.piece));
    }
    const auto level = std::find_if(open.begin(), open.end(), [](auto& pieces) { return !pieces.empty(); });
    const size_t now = level == open.end() ? kNobody : level->front();
    if (now == winner) continue;
    if (winner != kNobody && edge.time - since >= kShortest) {
      shown.push_back({all[winner].phase, all[winner].part, since, edge.time});
    }
    winner = now;
    since = edge.time;
  }
  return shown;
}

}  // namespace mykv
