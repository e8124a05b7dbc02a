// Converts records to trace events: a row for each name, and in the row a bar for each call, with its phases below the
// bar. Viewers require that the bars of a row nest, so calls of one name that overlap in time get separate rows.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "timeline/records.h"
#include "timeline/trace_phases.h"

namespace mykv {

class TraceRows {
 public:
  // Times in the file count from `zero` (now_ns()).
  TraceRows(int rank, int64_t zero) : rank_(rank), zero_(zero) {}

  static std::string first_event(int rank);
  // The write functions append events to `out`, each with ",\n" before it.
  void write(const RequestRecord& request, std::string* out);
  void write(const AwakeRecord& awake, std::string* out);
  void write_dropped(uint64_t requests, std::string* out);

 private:
  struct Lane {
    int number;
    int64_t end;  // of its last bar
  };
  int lane(const std::string& row, int64_t begin, int64_t end, bool on_top, std::string* out);
  void bar(int lane, std::string_view name, int64_t begin, int64_t end, std::string* out) const;
  void write_phase(const RequestRecord& request, const PhasePiece& piece, int tid, std::string* out) const;

  int rank_;
  int64_t zero_;
  int lanes_ = 0;
  std::unordered_map<std::string, std::vector<Lane>> rows_;
};

}  // namespace mykv
