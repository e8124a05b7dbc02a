#include "timeline/trace_events.h"

#include <algorithm>
#include <charconv>
#include <cstring>

#include "base/clock.h"

namespace mykv {

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

// Appends the ranks in the order of arrival, and how long (ms) each rank arrived after the first.
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

// Appends members of args, each with a comma before it.
void put_arrivals(std::string* out, const RequestRecord& request, const PartRecord& part) {
  const ArrivalRecord* const first = request.arrivals.data() + part.arrivals;
  put_order(out, first, part.ranks, ",\"order\":[", ",\"late_ms\":[");
  put_order(out, first + part.ranks, part.hosts, ",\"host_order\":[", ",\"host_late_ms\":[");
}

// The names of unnamed operations contain a number that differs for each call; the number is cut off, so they share a
// row.
std::string row_of(const std::string& name) {
  for (const char* numbered : {"/unnamed/", "/waiting/"}) {
    const size_t at = name.find(numbered);
    if (at == std::string::npos) continue;
    const size_t digits = at + std::strlen(numbered);
    const size_t rest = std::min(name.find_first_not_of("0123456789", digits), name.size());
    if (rest > digits) return name.substr(0, digits - 1) + name.substr(rest);
  }
  return name;
}

}  // namespace

std::string TraceRows::first_event(int rank) {
  const std::string number = std::to_string(rank);
  return R"({"ph":"M","pid":)" + number + R"(,"name":"process_name","args":{"name":"rank )" + number + "\"}}";
}

// The number of the row for a bar with these times; makes a new row if all rows are occupied.
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

// Appends a bar up to its args.
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
  put(out, ",\"name\":\"operations left out, the file could not be written fast enough\",\"args\":{\"operations\":");
  put_number(out, static_cast<int64_t>(requests));
  put(out, "}}");
}

}  // namespace mykv
