#include "agreement/agreement.h"

#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "base/hash.h"
#include "base/keep_forever.h"
#include "base/mpi_check.h"
#include "operations/signature.h"
#include "timeline/timeline.h"

namespace mykv {

Agreement::~Agreement() {
  // MPI may still read messages that are being sent; their memory is never freed.
  if (!sending_.empty()) keep_for_good(std::move(sending_));
}

void Agreement::announce(uint32_t index, uint32_t places) {
  if (closed_) return;
  Entry& entry = table_.entry(index);
  RankRecord& record = entry.records()[0];
  Message m;
  m.type = Message::Type::announce;
  m.key = entry.key;
  m.number = hash_bytes(entry.name, std::strlen(entry.name), record.signature_hash);
  m.priority = entry.operation.priority;
  m.error = entry.error.get();
  if (m.error.empty() && entry.key == entry.first) {
    m.late_rank = world_.hosts()[static_cast<size_t>(world_.host())][static_cast<size_t>(entry.arrivals.last)];
    m.waited_ns = std::min(table_.waited_for_last(entry), Message::kMostWaited);
  }
  const bool by_nccl = entry.operation.road == Road::nccl;
  if (by_nccl) m.placement = table_.placement(entry);
  if (told_.size() >= KnownTexts::kRemembered) told_.clear();
  if (told_.insert(m.number).second) {
    m.has_texts = true;
    m.name = entry.name;
    m.signature = record.text;
  }
  outstanding_.insert({m.key.high, m.key.low});
  if (world_.rank() == 0) {
    // Valid for all hosts: they bring the same operation, or it does not run.
    Pending& pending = pending_[{m.key.high, m.key.low}];
    pending.places = places;
    pending.bytes = by_nccl ? 0 : entry.operation.bytes();
    pending.meeting.ends_step = entry.arrivals.ends_step;
  }
  tell_root(m);
}

void Agreement::done(uint64_t sequence) {
  const auto it = under_way_.bytes.find(sequence);
  if (it == under_way_.bytes.end()) return;
  under_way_.all_bytes -= it->second;
  under_way_.bytes.erase(it);
  give_verdicts();
}

namespace {
Message departure(int rank, const Cause& reason) {
  Message m;
  m.type = Message::Type::depart;
  m.number = static_cast<uint64_t>(rank);
  m.error = reason.empty() ? Cause("no reason was given") : reason;
  return m;
}
}  // namespace

void Agreement::depart(int rank, const Cause& reason) {
  tell_root(departure(rank, reason));
  flush();
}

void Agreement::depart_alone(int rank, const Cause& reason) {
  encode(departure(rank, reason), world_.rank() == 0 ? &news_for_all_ : &news_);
  flush();
}

void Agreement::tell_root(const Message& message) {
  if (world_.rank() == 0) {
    handle(message, 0);
  } else {
    encode(message, &news_);
  }
}

// Rank 0 tells every host, its own host last: handling the message may create more messages.
void Agreement::tell_all(const Message& message) {
  encode(message, &news_for_all_);
  handle(message, 0);
}

void Agreement::flush() {
  if (!news_.empty()) send(std::make_shared<std::vector<char>>(std::exchange(news_, {})), 0);
  if (news_for_all_.empty()) return;
  const auto bytes = std::make_shared<std::vector<char>>(std::exchange(news_for_all_, {}));
  for (const std::vector<int>& ranks : world_.hosts()) {
    if (ranks[0] != 0) send(bytes, ranks[0]);
  }
}

void Agreement::send(std::shared_ptr<const std::vector<char>> bytes, int to) {
  traffic_.sent.add(bytes->size());
  sending_.push_back({std::move(bytes), MPI_REQUEST_NULL});
  Sending& s = sending_.back();
  check_mpi(
      MPI_Isend(s.bytes->data(), static_cast<int>(s.bytes->size()), MPI_BYTE, to, kTag, world_.control(), &s.request),
      "MPI_Isend between hosts");
}

void Agreement::progress_sending() {
  for (auto it = sending_.begin(); it != sending_.end();) {
    int ended = 0;
    check_mpi(MPI_Test(&it->request, &ended, MPI_STATUS_IGNORE), "MPI_Test between hosts");
    it = ended ? sending_.erase(it) : std::next(it);
  }
  flush();
}

bool Agreement::progress() {
  const bool told = !news_.empty() || !news_for_all_.empty();
  progress_sending();
  int from = 0;
  std::vector<char> buffer;
  if (!inbox_.take(&buffer, &from)) return told;
  traffic_.received.add(buffer.size());
  for (const Message& message : decode(buffer.data(), buffer.size())) {
    handle(message, from);
  }
  flush();
  return true;
}

void Agreement::handle(const Message& m, int from) {
  switch (m.type) {
    case Message::Type::announce:
      collect(m, from);
      return;
    case Message::Type::verdict:
      outstanding_.erase({m.key.high, m.key.low});
      // The other hosts begin the operation, so they must hear that this host does not.
      if (!table_.agree(m.key, m.number, m.error, m.placement) && table_.departed_rank() >= 0) {
        throw table_.departed();
      }
      return;
    case Message::Type::depart:
      // Rank 0 tells every host, also the sender, in the order of its verdicts: all hosts see the same operations
      // agreed on before this message and none after it.
      if (world_.rank() == 0 && departed_.empty()) {
        departed_ = Departed(static_cast<int>(m.number), m.error).cause();
        give_verdicts();
        tell_all(m);
        return;
      }
      if (closed_) return;
      outstanding_.clear();
      closed_ = true;
      table_.close(static_cast<int>(m.number), m.error);
      return;
    case Message::Type::give_up:
      decide_end(m);
      return;
    case Message::Type::end:
      end(m);
      return;
    case Message::Type::ended: {
      const auto it = given_up_.find({m.key.high, m.key.low});
      if (it == given_up_.end()) return;
      it->second.left.erase(from);
      if (it->second.left.empty()) given_up_.erase(it);
      return;
    }
  }
}

void Agreement::give_up(const Key& key, const Cause& reason) {
  Message m;
  m.type = Message::Type::give_up;
  m.key = key;
  m.error = reason;
  tell_root(m);
}

void Agreement::decide_end(const Message& m) {
  const KeyNumbers key{m.key.high, m.key.low};
  for (const auto& [place, ready] : ready_) {
    if (ready.key == m.key) return;  // all hosts have announced it
  }
  if (given_up_.find(key) == given_up_.end()) {
    GivenUp given_up;
    given_up.reason = m.error;
    for (const std::vector<int>& ranks : world_.hosts()) given_up.left.insert(ranks[0]);
    given_up_.emplace(key, std::move(given_up));
    pending_.erase(key);
  }
  tell_end(m.key);
}

void Agreement::tell_end(const Key& key) {
  Message m;
  m.type = Message::Type::end;
  m.key = key;
  m.error = given_up_.at({key.high, key.low}).reason;
  tell_all(m);
}

// Runs on every host. If this host announced the operation after rank 0 sent `end`, rank 0 sends `end` again when it
// gets the announcement.
void Agreement::end(const Message& m) {
  const bool announced = outstanding_.erase({m.key.high, m.key.low}) > 0;
  if (!table_.give_up(m.key, m.error, announced)) return;
  Message ended;
  ended.type = Message::Type::ended;
  ended.key = m.key;
  tell_root(ended);
}

std::vector<ArrivalRecord> Agreement::take_arrivals(const Key& key) {
  const auto it = observed_.arrivals.find({key.high, key.low});
  if (it == observed_.arrivals.end()) return {};
  std::vector<ArrivalRecord> taken = std::move(it->second);
  observed_.arrivals.erase(it);
  return taken;
}

void Agreement::collect(const Message& m, int from) {
  if (m.has_texts) texts_.add(m.number, {m.name, m.signature});
  if (given_up_.count({m.key.high, m.key.low}) > 0) {
    pending_.erase({m.key.high, m.key.low});
    tell_end(m.key);
    return;
  }
  Pending& p = pending_[{m.key.high, m.key.low}];
  if (p.hosts == 0) {
    p.text = m.number;
    p.rank = world_.label(from);
    p.priority = m.priority;
  }
  if (m.placement != 0) {
    const uint64_t of[2] = {static_cast<uint64_t>(from), m.placement};
    p.placement += hash_bytes(of, sizeof of, 0);
  }
  if (!m.error.empty()) p.error = m.error;  // a host's own error says more than a comparison here
  if (p.error.empty() && p.text != m.number) {
    const KnownTexts::Texts one = texts_.get(p.text), other = texts_.get(m.number);
    const int rank = world_.label(from);
    p.error = {difference(one.name, p.rank, one.signature, rank, other.signature), ErrorCode::mismatch, {p.rank, rank}};
  }
  const int64_t now = now_ns();
  observed_.late.announced(&p.meeting, m, from, now);
  if (Timeline::on()) p.arrivals.push_back({world_.label(from), now});
  if (++p.hosts < world_.hosts().size()) return;
  const Pending complete = std::move(p);
  pending_.erase({m.key.high, m.key.low});
  if (!Timeline::on()) observed_.arrivals.clear();
  if (!complete.error.empty()) {
    give_verdict(m.key, 0, complete.error);
  } else if (!departed_.empty()) {
    give_verdict(m.key, 0, shown_name(texts_.get(complete.text).name) + ": " + departed_);
  } else {
    observed_.late.complete(complete.meeting, now);
    ready_.emplace(std::make_pair(-int64_t{complete.priority}, ready_count_++), Ready{m.key, complete});
    give_verdicts();
  }
}

// Gives verdicts to ready operations within most_bytes_, but for at least two operations, however large: otherwise the
// network would idle while the next verdict travels. When a rank has left, all ready operations get their verdict,
// since all hosts had announced them before.
void Agreement::give_verdicts() {
  while (!ready_.empty()) {
    const auto first = ready_.begin();
    const size_t bytes = first->second.pending.bytes;
    const bool crowded = under_way_.bytes.size() > 1 && under_way_.all_bytes + bytes > most_bytes_;
    if (bytes > 0 && crowded && departed_.empty()) return;
    const Ready next = std::move(first->second);
    ready_.erase(first);
    const uint64_t sequence = next_sequence_;
    next_sequence_ += next.pending.places;
    if (bytes > 0) under_way_.bytes[sequence] = bytes;
    under_way_.all_bytes += bytes;
    if (!next.pending.arrivals.empty()) observed_.arrivals[{next.key.high, next.key.low}] = next.pending.arrivals;
    give_verdict(next.key, sequence, {}, next.pending.placement);
  }
}

void Agreement::give_verdict(const Key& key, uint64_t sequence, const Cause& error, uint64_t placement) {
  Message verdict;
  verdict.type = Message::Type::verdict;
  verdict.key = key;
  verdict.number = sequence;
  verdict.error = error;
  verdict.placement = placement;
  tell_all(verdict);
}

}  // namespace mykv
