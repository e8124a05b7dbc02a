#include "timeline/record_file.h"

#include <unistd.h>

#include <cerrno>

#include "base/clock.h"

namespace mykv {

namespace {

template <class T>
size_t bytes_of(const std::vector<T>& values) {
  return values.size() * sizeof(T);
}

}  // namespace

void RecordFile::append_head(RecordHead::Kind kind, size_t bytes_after) {
  const RecordHead head{kind, static_cast<uint32_t>(sizeof(RecordHead) + bytes_after)};
  append(&head, 1);
}

void RecordFile::add(const RequestRecord& request) {
  RequestFields fields{};
  fields.begin = request.begin;
  fields.end = request.end;
  fields.bytes = request.bytes;
  fields.turn = request.turn;
  fields.priority = request.priority;
  fields.parts_planned = static_cast<uint32_t>(request.parts_planned);
  fields.parts = static_cast<uint32_t>(request.parts.size());
  fields.arrivals = static_cast<uint32_t>(request.arrivals.size());
  fields.name_bytes = static_cast<uint32_t>(request.name.size());
  fields.signature_bytes = static_cast<uint32_t>(request.signature.size());
  append_head(RecordHead::request, sizeof fields + bytes_of(request.parts) + bytes_of(request.arrivals) +
                                       request.name.size() + request.signature.size() + request.error.size());
  append(&fields, 1);
  append(request.parts.data(), request.parts.size());
  append(request.arrivals.data(), request.arrivals.size());
  waiting_ += request.name;
  waiting_ += request.signature;
  waiting_ += request.error;
}

void RecordFile::add(const AwakeRecord& awake) {
  const AwakeFields fields{awake.begin, awake.end};
  append_head(RecordHead::awake, sizeof fields + awake.thread.size());
  append(&fields, 1);
  waiting_ += awake.thread;
}

void RecordFile::add_dropped(uint64_t requests) {
  const DroppedFields fields{now_ns(), requests};
  append_head(RecordHead::dropped, sizeof fields);
  append(&fields, 1);
}

int RecordFile::write() {
  const char* data = waiting_.data();
  for (size_t left = waiting_.size(); left > 0;) {
    const ssize_t n = ::pwrite(fd_.get(), data, left, static_cast<off_t>(end_));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno;
    if (n == 0) return EIO;
    data += n;
    left -= static_cast<size_t>(n);
    end_ += static_cast<size_t>(n);
  }
  waiting_.clear();
  return 0;
}

}  // namespace mykv
