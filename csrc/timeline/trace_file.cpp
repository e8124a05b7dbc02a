#include "timeline/trace_file.h"

#include <unistd.h>

#include <cerrno>

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
  // Restores the closing brackets behind the previous events; their space on the disk is allocated already.
  const size_t before = end_ == 0 ? 0 : end_ + sizeof kClosing - 1;
  if (::ftruncate(fd_.get(), static_cast<off_t>(before)) == 0 && before > 0) {
    write_all(fd_.get(), kClosing, sizeof kClosing - 1, end_);
  }
  return failure;
}

}  // namespace mykv
