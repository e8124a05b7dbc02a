// The timeline's file: a line of JSON about the job, then records. kvstore_plugin/timeline/recording.py reads it, and
// makes the page and the trace for viewers. A file that ends within a record is valid without this record, so neither a
// killed process nor a full disk leaves a broken file.
#pragma once

#include <string>
#include <type_traits>

#include "base/file_descriptor.h"
#include "timeline/records.h"

namespace mykv {

// The beginning of each record. All numbers are little-endian.
struct RecordHead {
  enum Kind : uint32_t { request = 1, awake = 2, dropped = 3 };
  uint32_t kind;
  uint32_t bytes;  // of the whole record, with this head
};

// Followed by its parts, its arrivals, its name, its signature and its error.
struct RequestFields {
  int64_t begin;
  int64_t end;
  uint64_t bytes;
  uint64_t turn;
  int32_t priority;
  uint32_t parts_planned;
  uint32_t parts;
  uint32_t arrivals;
  uint32_t name_bytes;
  uint32_t signature_bytes;
};

// Followed by the thread's name.
struct AwakeFields {
  int64_t begin;
  int64_t end;
};

// Operations that were left out until `time`, since the file could not be written fast enough.
struct DroppedFields {
  int64_t time;
  uint64_t requests;
};

class RecordFile {
 public:
  // `fd`: an open, empty, regular file.
  explicit RecordFile(FileDescriptor fd) : fd_(std::move(fd)) {}

  // The add functions only append to the memory that write() empties.
  void add_line(const std::string& text) { waiting_ += text + '\n'; }
  void add(const RequestRecord& request);
  void add(const AwakeRecord& awake);
  void add_dropped(uint64_t requests);
  size_t bytes_to_write() const { return waiting_.size(); }
  // Returns 0, or the errno of the write that failed; nothing may be written after that.
  int write();

 private:
  template <class T>
  void append(const T* values, size_t count) {
    static_assert(std::has_unique_object_representations_v<T>, "the file has no padding");
    waiting_.append(reinterpret_cast<const char*>(values), count * sizeof(T));
  }
  void append_head(RecordHead::Kind kind, size_t bytes_after);

  FileDescriptor fd_;
  std::string waiting_;
  size_t end_ = 0;
};

}  // namespace mykv
