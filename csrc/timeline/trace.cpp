#include "timeline/trace.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>

#include "base/clock.h"

namespace mykv {

namespace {

constexpr char kClosing[] = "\n]}\n";

int write_all(int fd, const char* data, size_t bytes, size_t offset) {
  while (bytes > 0) {
    const ssize_t n = ::pwrite(fd, data, bytes, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno;
    if (n == 0) return EIO;
    data += n;
    bytes -= static_cast<size_t>(n);
    offset += static_cast<size_t>(n);
  }
  return 0;
}

}  // namespace

int TraceFile::begin(const std::string& members, const std::string& first_event) {
  std::string text = "{" + members + ",\n\"traceEvents\": [\n" + first_event;
  return write(&text);
}

int TraceFile::append(std::string* events) { return events->empty() ? 0 : write(events); }

int TraceFile::write(std::string* text) {
  const size_t bytes = text->size();
  *text += kClosing;
  const int failure = write_all(fd_.get(), text->data(), text->size(), end_);
  text->clear();
  if (failure == 0) {
    end_ += bytes;
    return 0;
  }
  // Restores the closing brackets after the previous events; the disk has space for them already.
  const size_t before = end_ == 0 ? 0 : end_ + sizeof kClosing - 1;
  if (::ftruncate(fd_.get(), static_cast<off_t>(before)) == 0 && before > 0) {
    write_all(fd_.get(), kClosing, sizeof kClosing - 1, end_);
  }
  return failure;
}

namespace {

constexpr size_t kPhases = 6;
constexpr int64_t kShortest = 100;  // ns; shorter pieces are not shown

// All phases of all parts; phases of different parts overlap.
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

// The phases of a part follow each other. Removes small overlaps: different threads read the times, and some read them
// late.
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
  std::array<std::vector<size_t>, kPhases> open;  // open pieces of each phase
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

namespace {

template <size_t size>
void put(std::string* out, const char (&text)[size]) {
  out->append(text, size - 1);
}

void put_number(std::string* out, int64_t number) {
  char digits[24];
  const auto end = std::to_chars(digits, digits + sizeof digits, number).ptr;
  out->append(digits, static_cast<size_t>(end - digits));
}

// Appends number / 1000 with three decimals: nanoseconds as microseconds.
void put_thousandth(std::string* out, int64_t number) {
  number = std::max<int64_t>(number, 0);
  char digits[24];
  char* end = std::to_chars(digits, digits + sizeof digits, number / 1000).ptr;
  const auto rest = static_cast<int>(number % 1000);
  *end++ = '.';
  *end++ = static_cast<char>('0' + rest / 100);
  *end++ = static_cast<char>('0' + rest / 10 % 10);
  *end++ = static_cast<char>('0' + rest % 10);
  out->append(digits, static_cast<size_t>(end - digits));
}

void put_text(std::string* out, std::string_view text) {
  constexpr char kHex[] = "0123456789abcdef";
  out->push_back('"');
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out->push_back('\\');
      out->push_back(c);
    } else if (static_cast<unsigned char>(c) < 0x20) {
      put(out, "\\u00");
      out->push_back(kHex[static_cast<unsigned char>(c) >> 4]);
      out->push_back(kHex[c & 15]);
    } else {
      out->push_back(c);
    }
  }
  out->push_back('"');
}

// Appends the ranks in the order of arrival, and how many milliseconds after the first rank each rank arrived.
template <size_t n, size_t m>
void put_order(std::string* out, const ArrivalRecord* begin, uint32_t count, const char (&order)[n],
               const char (&late)[m]) {
  if (count == 0) return;
  std::vector<ArrivalRecord> arrivals(begin, begin + count);
  std::stable_sort(arrivals.begin(), arrivals.end(), [](auto& a, auto& b) { return a.time < b.time; });
  put(out, order);
  for (const ArrivalRecord& arrival : arrivals) {
    put_number(out, arrival.rank);
    out->push_back(',');
  }
  out->back() = ']';
  put(out, late);
  for (const ArrivalRecord& arrival : arrivals) {
    put_thousandth(out, (arrival.time - arrivals[0].time) / 1000);
    out->push_back(',');
  }
  out->back() = ']';
}

// Appends members of an event's args, each with a comma before it.
void put_arrivals(std::string* out, const RequestRecord& request, const PartRecord& part) {
  const ArrivalRecord* const first = request.arrivals.data() + part.arrivals;
  put_order(out, first, part.ranks, ",\"order\":[", ",\"late_ms\":[");
  put_order(out, first + part.ranks, part.hosts, ",\"host_order\":[", ",\"host_late_ms\":[");
}

// The row of an operation. Names of unnamed operations, and of calls of layers ("/forward/12.0"), contain a number that
// differs for each call. The number is cut off, so that these calls share a row.
std::string row_of(const std::string& name) {
  for (const char* numbered : {"/unnamed/", "/waiting/", "/forward/", "/backward/"}) {
    const size_t at = name.find(numbered);
    if (at == std::string::npos) continue;
    const size_t digits = at + std::strlen(numbered);
    const size_t rest = std::min(name.find_first_not_of("0123456789.-", digits), name.size());
    if (rest > digits) return name.substr(0, digits - 1) + name.substr(rest);
  }
  return name;
}

}  // namespace

std::string TraceRows::first_event(int rank) {
  const std::string number = std::to_string(rank);
  return R"({"ph":"M","pid":)" + number + R"(,"name":"process_name","args":{"name":"rank )" + number + "\"}}";
}

// The number of the row for a bar with these times; creates a new row if all rows are occupied.
int TraceRows::lane(const std::string& row, int64_t begin, int64_t end, bool on_top, std::string* out) {
  std::vector<Lane>& lanes = rows_[row];
  for (Lane& lane : lanes) {
    if (lane.end > begin) continue;
    lane.end = end;
    return lane.number;
  }
  lanes.push_back({++lanes_, end});
  const auto put_about_thread = [&] {
    put(out, ",\n{\"ph\":\"M\",\"pid\":");
    put_number(out, rank_);
    put(out, ",\"tid\":");
    put_number(out, lanes_);
  };
  put_about_thread();
  put(out, ",\"name\":\"thread_name\",\"args\":{\"name\":");
  put_text(out, row);
  put(out, "}}");
  put_about_thread();
  put(out, ",\"name\":\"thread_sort_index\",\"args\":{\"sort_index\":");
  put_number(out, on_top ? -1 : lanes_);
  put(out, "}}");
  return lanes_;
}

// Appends a bar without its args and its closing bracket.
void TraceRows::bar(int lane, std::string_view name, int64_t begin, int64_t end, std::string* out) const {
  put(out, ",\n{\"ph\":\"X\",\"pid\":");
  put_number(out, rank_);
  put(out, ",\"tid\":");
  put_number(out, lane);
  put(out, ",\"ts\":");
  put_thousandth(out, begin - zero_);
  put(out, ",\"dur\":");
  put_thousandth(out, end - begin);
  put(out, ",\"name\":");
  put_text(out, name);
}

void TraceRows::write(const RequestRecord& request, std::string* out) {
  const std::string row = row_of(request.name);
  const int tid = lane(row, request.begin, request.end, false, out);
  // "allreduce sum of float32 (3, 4)": the bar is named by the text before " of "; its args have the rest.
  bar(tid, std::string_view(request.signature).substr(0, request.signature.find(" of ")), request.begin, request.end,
      out);
  put(out, ",\"args\":{\"bytes\":");
  put_number(out, static_cast<int64_t>(request.bytes));
  put(out, ",\"turn\":");
  put_number(out, static_cast<int64_t>(request.turn));
  if (row != request.name) {
    put(out, ",\"operation\":");
    put_text(out, request.name);
  }
  put(out, ",\"signature\":");
  put_text(out, request.signature);
  if (request.priority != 0) {
    put(out, ",\"priority\":");
    put_number(out, request.priority);
  }
  if (request.parts_planned > 1) {
    put(out, ",\"parts\":");
    put_number(out, static_cast<int64_t>(request.parts_planned));
  }
  if (!request.error.empty()) {
    put(out, ",\"error\":");
    put_text(out, request.error);
  }
  const auto first = std::find_if(request.parts.begin(), request.parts.end(), [](auto& p) { return p.number == 0; });
  if (first != request.parts.end()) put_arrivals(out, request, *first);
  put(out, "}}");
  for (const PhasePiece& piece : phases_of(request)) write_phase(request, piece, tid, out);
}

void TraceRows::write_phase(const RequestRecord& request, const PhasePiece& piece, int tid, std::string* out) const {
  const PartRecord& part = request.parts[piece.part];
  const bool waiting = piece.phase == Phase::wait;
  bar(tid, phase_name(piece.phase), piece.begin, piece.end, out);
  if (request.parts_planned > 1 || waiting) {
    put(out, ",\"args\":{\"part\":");
    put_number(out, part.number);
    if (waiting) put_arrivals(out, request, part);
    put(out, "}");
  }
  put(out, "}");
}

void TraceRows::write(const AwakeRecord& awake, std::string* out) {
  const int64_t begin = std::max(awake.begin, zero_);
  bar(lane(awake.thread, begin, awake.end, true, out), "awake", begin, awake.end, out);
  put(out, "}");
}

void TraceRows::write_dropped(uint64_t requests, std::string* out) {
  put(out, ",\n{\"ph\":\"i\",\"s\":\"p\",\"pid\":");
  put_number(out, rank_);
  put(out, ",\"tid\":0,\"ts\":");
  put_thousandth(out, now_ns() - zero_);
  put(out, ",\"name\":\"operations left out: the file could not be written fast enough\",\"args\":{\"operations\":");
  put_number(out, static_cast<int64_t>(requests));
  put(out, "}}");
}

}  // namespace mykv
