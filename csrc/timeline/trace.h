// A file of trace events in Chrome's format that is valid JSON at every moment: each write ends with the closing
// brackets, and the next write overwrites them. So neither a killed process nor a full disk leaves a broken file.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/file_descriptor.h"
#include "timeline/records.h"

namespace mykv {

class TraceFile {
 public:
  TraceFile() = default;
  // `fd`: an open, empty, regular file.
  explicit TraceFile(FileDescriptor fd) : fd_(std::move(fd)) {}

  // Writes the beginning: members of the outer object, and the first event. Returns 0 or an errno, as append() does.
  int begin(const std::string& members, const std::string& first_event);
  // `events`: events, each with ",\n" before it. If they cannot be written completely, the file stays as it was.
  // `events` is empty afterwards, and keeps its memory.
  int append(std::string* events);

 private:
  int write(std::string* text);

  FileDescriptor fd_;
  size_t end_ = 0;  // end of the last event in the file
};

// The phase of an operation that is shown at each moment. The parts of a large array are in different phases at the
// same time, but a row can show only one phase: first the work of the rank's own thread, then work of other threads,
// last waiting.

enum class Phase : uint8_t { copy_in, copy_out, reduce, spread, network, wait };  // in the order of precedence

const char* phase_name(Phase phase);

struct PhasePiece {
  Phase phase;
  size_t part;  // index in RequestRecord::parts
  int64_t begin;
  int64_t end;
};

// The shown phases: disjoint, in the order of time, within the request's times.
std::vector<PhasePiece> phases_of(const RequestRecord& request);

// Converts records to trace events: a row for each name, and in the row a bar for each call, with its phases below the
// bar. Viewers require that the bars of a row nest, so calls of one name that overlap in time get separate rows.

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
    int64_t end;  // end of the lane's last bar
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
