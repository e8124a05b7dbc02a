// A file of trace events in Chrome's format that is valid JSON at every moment: each write ends with the closing
// brackets, and the next write overwrites them. So neither a killed process nor a full disk leaves a broken file.
#pragma once

#include <string>

#include "base/file_descriptor.h"

namespace mykv {

class TraceFile {
 public:
  TraceFile() = default;
  // An open, empty, regular file.
  explicit TraceFile(FileDescriptor fd) : fd_(std::move(fd)) {}

  // Writes the beginning: members of the outer object, and the first event. Returns 0 or an errno, as append() does.
  int begin(const std::string& members, const std::string& first_event);
  // `events`: events, each with ",\n" before it. If they cannot be written completely, the file stays as it was.
  // Clears `events`, which keeps its memory.
  int append(std::string* events);

 private:
  int write(std::string* text);

  FileDescriptor fd_;
  size_t end_ = 0;  // end of the last event in the file
};

}  // namespace mykv
