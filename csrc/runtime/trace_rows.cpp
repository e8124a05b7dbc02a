#include "runtime/trace_rows.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>

#include "runtime/trace_phases.h"

namespace mykv {

namespace {

void put(std::string* out, const char* text) { out->append(text); }

void put(std::string* out, int64_t number) {
  char digits[24];
  const auto end = std::to_chars(digits, digits + sizeof digits, number).ptr;
  out->append(digits, static_cast<size_t>(end - digits));
}

// A thousandth of `number`, with three decimals: microseconds from nanoseconds.
void put_thousandth(std::string* out, int64_t number) {
  number = std::max<int64_t>(number, 0);
  put(out, number / 1000);
  const auto rest = static_cast<int>(number % 1000);
  const char decimals[] = {'.', static_cast<char>('0' + rest / 100), static_cast<char>('0' + rest / 10 % 10),
                           static_cast<char>('0' + rest % 10)};
  out->append(decimals, sizeof decimals);
}

void put_text(std::string* out, const std::string& text) {
  out->push_back('"');
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out->push_back('\\');
      out->push_back(c);
    } else if (static_cast<unsigned char>(c) < 0x20) {
      constexpr char kHex[] = "0123456789abcdef";
      put(out, "\\u00");
      out->push_back(kHex[static_cast<unsigned char>(c) >> 4]);
      out->push_back(kHex[c & 15]);
    } else {
      out->push_back(c);
    }
  }
  out->push_back('"');
}

// The arrivals in their order, and how long (ms) each of them came after the first.
void put_arrivals(std::string* out, std::vector<PartRecord::Arrival> arrivals, const char* order, const char* late) {
  std::stable_sort(arrivals.begin(), arrivals.end(), [](auto& a, auto& b) { return a.time < b.time; });
  put(out, order);
  for (size_t i = 0; i < arrivals.size(); ++i) {
    if (i > 0) out->push_back(',');
    put(out, arrivals[i].rank);
  }
  put(out, late);
  for (size_t i = 0; i < arrivals.size(); ++i) {
    if (i > 0) out->push_back(',');
    put_thousandth(out, (arrivals[i].time - arrivals[0].time) / 1000);
  }
  out->push_back(']');
}

// Members of args, each with a comma before it.
void put_arrivals(std::string* out, const PartRecord& part) {
  if (!part.ranks.empty()) put_arrivals(out, part.ranks, ",\"order\":[", "],\"late_ms\":[");
  if (!part.hosts.empty()) put_arrivals(out, part.hosts, ",\"host_order\":[", "],\"host_late_ms\":[");
}

// Operations without a name get a number from the caller, another one for each call: they share a row.
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

int TraceRows::lane(const std::string& row, int64_t begin, int64_t end, bool on_top, std::string* out) {
  std::vector<Lane>& lanes = rows_[row];
  for (Lane& lane : lanes) {
    if (lane.end > begin) continue;
    lane.end = end;
    return lane.number;
  }
  lanes.push_back({++lanes_, end});
  for (const char* about : {"thread_name", "thread_sort_index"}) {
    put(out, ",\n{\"ph\":\"M\",\"pid\":");
    put(out, rank_);
    put(out, ",\"tid\":");
    put(out, lanes_);
    put(out, ",\"name\":\"");
    put(out, about);
    if (std::strcmp(about, "thread_name") == 0) {
      put(out, "\",\"args\":{\"name\":");
      put_text(out, row);
    } else {
      put(out, "\",\"args\":{\"sort_index\":");
      put(out, on_top ? -1 : lanes_);
    }
    put(out, "}}");
  }
  return lanes_;
}

// A bar without its end: members and the closing bracket follow.
void TraceRows::bar(int lane, const char* name, size_t name_bytes, int64_t begin, int64_t end, std::string* out) const {
  put(out, ",\n{\"ph\":\"X\",\"pid\":");
  put(out, rank_);
  put(out, ",\"tid\":");
  put(out, lane);
  put(out, ",\"ts\":");
  put_thousandth(out, begin - zero_);
  put(out, ",\"dur\":");
  put_thousandth(out, end - begin);
  put(out, ",\"name\":");
  put_text(out, std::string(name, name_bytes));
}

void TraceRows::write(const FlightRecord& flight, std::string* out) {
  const std::string row = row_of(flight.name);
  const int tid = lane(row, flight.begin, flight.end, false, out);
  // "allreduce sum of float32 (3, 4)": the bar shows what is done, its arguments the rest.
  const size_t what = std::min(flight.signature.find(" of "), flight.signature.size());
  bar(tid, flight.signature.data(), what, flight.begin, flight.end, out);
  put(out, ",\"args\":{\"bytes\":");
  put(out, static_cast<int64_t>(flight.bytes));
  put(out, ",\"turn\":");
  put(out, static_cast<int64_t>(flight.turn));
  if (row != flight.name) {
    put(out, ",\"operation\":");
    put_text(out, flight.name);
  }
  put(out, ",\"signature\":");
  put_text(out, flight.signature);
  if (flight.priority != 0) {
    put(out, ",\"priority\":");
    put(out, flight.priority);
  }
  if (flight.parts_planned > 1) {
    put(out, ",\"parts\":");
    put(out, static_cast<int64_t>(flight.parts_planned));
  }
  if (!flight.error.empty()) {
    put(out, ",\"error\":");
    put_text(out, flight.error);
  }
  const auto first = std::find_if(flight.parts.begin(), flight.parts.end(), [](auto& p) { return p.number == 0; });
  if (first != flight.parts.end()) put_arrivals(out, *first);
  put(out, "}}");
  for (const PhasePiece& piece : phases_of(flight)) {
    const PartRecord& part = flight.parts[piece.part];
    const char* name = phase_name(piece.phase);
    bar(tid, name, std::strlen(name), piece.begin, piece.end, out);
    const bool waiting = piece.phase == Phase::wait;
    if (flight.parts_planned > 1 || waiting) {
      put(out, ",\"args\":{\"part\":");
      put(out, part.number);
      if (waiting) put_arrivals(out, part);
      put(out, "}");
    }
    put(out, "}");
  }
}

void TraceRows::write(const AwakeRecord& awake, std::string* out) {
  const int64_t begin = std::max(awake.begin, zero_);
  const int tid = lane(awake.thread, begin, awake.end, true, out);
  bar(tid, "awake", 5, begin, awake.end, out);
  put(out, "}");
}

void TraceRows::write_dropped(uint64_t flights, std::string* out) {
  put(out, ",\n{\"ph\":\"i\",\"s\":\"p\",\"pid\":");
  put(out, rank_);
  put(out, ",\"tid\":0,\"ts\":");
  put_thousandth(out, now_ns() - zero_);
  put(out, ",\"name\":\"operations left out, the file could not be written fast enough\",\"args\":{\"operations\":");
  put(out, static_cast<int64_t>(flights));
  put(out, "}}");
}

}  // namespace mykv
