// A file of trace events in Chrome's format that is valid JSON at every moment: each write ends with the closing
// brackets, and the next one begins in their place. So neither a killed process nor a full disk leaves a broken file.
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
  // `events`: each of them with ",\n" before it. If not all of it can be written, none of it is there afterwards.
  // Empties `events`, which keeps its memory.
  int append(std::string* events);

 private:
  int write(std::string* text);

  FileDescriptor fd_;
  size_t end_ = 0;  // of the last event
};

}  // namespace mykv
