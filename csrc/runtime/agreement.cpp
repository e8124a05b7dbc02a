#include "runtime/agreement.h"

#include <cstring>

#include "runtime/error.h"

namespace mykv {

namespace {

constexpr int kTag = 1;

void check(int code, const char* what) {
  if (code != MPI_SUCCESS) throw Error(std::string("MPI failed in ") + what + " between hosts");
}

void put(std::vector<char>& out, const void* data, size_t bytes) {
  const auto* p = static_cast<const char*>(data);
  out.insert(out.end(), p, p + bytes);
}

void put(std::vector<char>& out, const std::string& text) {
  const auto size = static_cast<uint32_t>(text.size());
  put(out, &size, sizeof size);
  put(out, text.data(), text.size());
}

// Reads what put() wrote; a message that is too short for what it claims is refused.
class Reader {
 public:
  Reader(const char* data, size_t bytes) : data_(data), left_(bytes) {}
  void get(void* to, size_t bytes) {
    if (bytes > left_) throw Error("mykv received a malformed message from another host (different versions?)");
    std::memcpy(to, data_, bytes);
    data_ += bytes;
    left_ -= bytes;
  }
  std::string text() {
    uint32_t size = 0;
    get(&size, sizeof size);
    if (size > left_) throw Error("mykv received a malformed message from another host (different versions?)");
    std::string result(data_, size);
    data_ += size;
    left_ -= size;
    return result;
  }

 private:
  const char* data_;
  size_t left_;
};

}  // namespace

struct Agreement::Message {
  enum class Type : uint8_t { announce = 1, verdict = 2, depart = 3 };
  Type type = Type::announce;
  Key key;
  uint64_t number = 0;  // announce: the signature's hash; verdict: the sequence; depart: the rank
  std::string name;
  std::string signature;
  std::string error;

  std::vector<char> encode() const {
    std::vector<char> out;
    put(out, &type, sizeof type);
    put(out, &key, sizeof key);
    put(out, &number, sizeof number);
    put(out, name);
    put(out, signature);
    put(out, error);
    return out;
  }
  static Message decode(const std::vector<char>& bytes) {
    Message m;
    Reader reader(bytes.data(), bytes.size());
    reader.get(&m.type, sizeof m.type);
    reader.get(&m.key, sizeof m.key);
    reader.get(&m.number, sizeof m.number);
    m.name = reader.text();
    m.signature = reader.text();
    m.error = reader.text();
    return m;
  }
};

void Agreement::announce(uint32_t index) {
  if (closed_) return;
  Entry& entry = rendezvous_.entry(index);
  Message m;
  m.type = Message::Type::announce;
  m.key = entry.key;
  m.number = entry.records()[0].signature_hash;
  m.name = entry.name;
  m.signature = entry.records()[0].text;
  m.error = entry.error;
  ++outstanding_;
  send(m, 0);
}

void Agreement::depart(int rank, const std::string& reason) {
  Message m;
  m.type = Message::Type::depart;
  m.number = static_cast<uint64_t>(rank);
  m.error = reason;
  send(m, 0);
}

void Agreement::send(const Message& message, int to) {
  if (to == world_.rank()) {
    handle(message, to);
    return;
  }
  sending_.push_back({message.encode(), MPI_REQUEST_NULL});
  Sending& s = sending_.back();
  check(MPI_Isend(s.bytes.data(), static_cast<int>(s.bytes.size()), MPI_BYTE, to, kTag, world_.control(), &s.request),
        "MPI_Isend");
}

bool Agreement::progress() {
  for (auto it = sending_.begin(); it != sending_.end();) {
    int done = 0;
    check(MPI_Test(&it->request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    it = done ? sending_.erase(it) : std::next(it);
  }
  int there = 0;
  MPI_Message handle_of_message;
  MPI_Status status;
  check(MPI_Improbe(MPI_ANY_SOURCE, kTag, world_.control(), &there, &handle_of_message, &status), "MPI_Improbe");
  if (!there) return false;
  int bytes = 0;
  MPI_Get_count(&status, MPI_BYTE, &bytes);
  std::vector<char> buffer(static_cast<size_t>(bytes));
  check(MPI_Mrecv(buffer.data(), bytes, MPI_BYTE, &handle_of_message, &status), "MPI_Mrecv");
  handle(Message::decode(buffer), status.MPI_SOURCE);
  return true;
}

void Agreement::handle(const Message& m, int from) {
  switch (m.type) {
    case Message::Type::announce:
      collect(m, from);
      return;
    case Message::Type::verdict:
      if (outstanding_ > 0) --outstanding_;
      rendezvous_.agree(m.key, m.number, m.error);
      return;
    case Message::Type::depart:
      // Rank 0 tells every host, the one that it comes from too, in the order of its verdicts: all hosts see the same
      // operations agreed on before it and none after it.
      if (world_.rank() == 0) {
        if (!departed_.empty()) return;
        departed_ = "rank " + std::to_string(m.number) + " has left: " + m.error;
        for (const std::vector<int>& ranks : world_.hosts()) {
          if (ranks[0] != 0) send(m, ranks[0]);
        }
      }
      outstanding_ = 0;
      closed_ = true;
      rendezvous_.close(static_cast<int>(m.number), m.error);
      return;
  }
}

std::vector<ArrivalRecord> Agreement::take_arrivals(const Key& key) {
  const auto it = arrivals_.find({key.high, key.low});
  if (it == arrivals_.end()) return {};
  std::vector<ArrivalRecord> taken = std::move(it->second);
  arrivals_.erase(it);
  return taken;
}

void Agreement::collect(const Message& m, int from) {
  Pending& p = pending_[{m.key.high, m.key.low}];
  if (p.hosts == 0) {
    p.signature_hash = m.number;
    p.name = m.name;
    p.signature = m.signature;
    p.rank = world_.label(from);
  }
  if (!m.error.empty()) p.error = m.error;  // what a host found out by itself says more than a comparison here
  if (p.error.empty() && p.signature_hash != m.number) {
    p.error = p.name + " differs between ranks: rank " + std::to_string(p.rank) + " has " + p.signature + ", rank " +
              std::to_string(world_.label(from)) + " has " + m.signature;
  }
  if (Timeline::on()) p.arrivals.push_back({world_.label(from), now_ns()});
  if (++p.hosts < world_.hosts().size()) return;
  Message verdict;
  verdict.type = Message::Type::verdict;
  verdict.key = m.key;
  verdict.error = p.error;
  if (p.error.empty() && !departed_.empty()) verdict.error = p.name + ": " + departed_;
  verdict.number = verdict.error.empty() ? next_sequence_++ : 0;
  if (!Timeline::on()) arrivals_.clear();
  if (Timeline::on() && verdict.error.empty()) arrivals_[{m.key.high, m.key.low}] = std::move(p.arrivals);
  pending_.erase({m.key.high, m.key.low});
  for (const std::vector<int>& ranks : world_.hosts()) send(verdict, ranks[0]);
}

}  // namespace mykv
