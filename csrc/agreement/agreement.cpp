#include "agreement/agreement.h"

#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "kernels/kernels.h"
#include "operations/operation.h"
#include "operations/signature.h"
#include "timeline/timeline.h"

namespace mykv {

void LateHosts::announced(HostsMeeting* meeting, const Message& message, size_t branch, int64_t now) const {
  const bool counts = tree_.includes(branch, message.late_rank);
  meeting->last = counts ? message.late_rank : -1;
  if (!counts) return;
  if (meeting->first == 0) meeting->first = now;
  meeting->later += static_cast<int64_t>(tree_.ranks_of(branch)) * (now - meeting->first);
  meeting->waited += message.waited_ns;
}

int64_t LateHosts::waited(const HostsMeeting& meeting, int64_t now) const {
  return static_cast<int64_t>(tree_.all_ranks()) * (now - meeting.first) - meeting.later + meeting.waited;
}

void LateHosts::complete(const HostsMeeting& meeting, int64_t now) {
  if (meeting.last < 0) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  of_[meeting.last].add(waited(meeting, now) / std::max<int64_t>(world_.size() - 1, 1), meeting.ends_step);
}

std::vector<LateRank> LateHosts::ranks() {
  std::vector<LateRank> late;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [rank, lateness] : of_) late.emplace_back(world_.label(rank), lateness);
  return late;
}

namespace {

constexpr int kMostTaken = 256;  // most messages handled in one call of progress()

Message departure(Message::Type type, int rank, const Failure& reason) {
  Message m;
  m.type = type;
  m.number = static_cast<uint64_t>(rank);
  m.error = reason.empty() ? Failure("no reason was given") : reason;
  return m;
}

}  // namespace

Agreement::Agreement(const World& world, HostTable& table, size_t most_bytes, size_t fan_out)
    : world_(world),
      table_(table),
      most_bytes_(most_bytes),
      tree_(world, fan_out),
      inbox_(world.control(), kTag),
      outbox_(world, tree_, kTag),
      observed_{{}, LateHosts(world, tree_)} {}

void Agreement::announce(uint32_t index, uint32_t sequence_numbers, std::optional<std::vector<char>> carried,
                         Failure error) {
  if (closed_) return;
  Entry& entry = table_.entry(index);
  RankRecord& record = entry.records()[0];
  Message m;
  m.type = Message::Type::announce;
  m.key = entry.key;
  m.number = hash_bytes(entry.name, std::strlen(entry.name), record.signature_hash);
  m.priority = entry.operation.priority;
  m.error = std::move(error);
  if (m.error.empty() && entry.key == entry.first) {
    m.late_rank = world_.host_ranks()[static_cast<size_t>(entry.arrivals.last)];
    m.waited_ns = std::min(table_.waited_for_last(entry), Message::kMostWaited);
  }
  ReadyHook* const hook = table_.hook_of(entry.operation);
  if (hook != nullptr) m.placement = hook->placement(entry);
  if (told_.here.size() >= KnownTexts::kRemembered) told_.here.clear();
  if (!record.refused && told_.here.insert(m.number).second) {  // a refusal is sent as the error, with its reason
    m.has_texts = true;
    m.name = entry.name;
    m.signature = table_.text_of(record);
  }
  outstanding_.add({m.key.high, m.key.low}, carried.has_value());
  // This host's values are right for all hosts: if another host has a different operation, the operation does not run.
  Pending& pending = pending_[{m.key.high, m.key.low}];
  pending.sequence_numbers = sequence_numbers;
  pending.bytes = hook != nullptr || carried ? 0 : entry.operation.bytes();
  pending.meeting.ends_step = entry.arrivals.ends_step;
  if (carried) {
    pending.carried = entry.operation;
    m.values = std::move(*carried);
  }
  collect(std::move(m), world_.rank());
}

std::vector<char> Agreement::take_result(const Key& key) {
  auto result = results_.extract({key.high, key.low});
  return result.empty() ? std::vector<char>() : std::move(result.mapped());
}

void Agreement::done(uint64_t sequence) {
  const auto it = under_way_.bytes.find(sequence);
  if (it == under_way_.bytes.end()) return;
  under_way_.all_bytes -= it->second;
  under_way_.bytes.erase(it);
  give_verdicts();
}

void Agreement::depart(int rank, const Failure& reason) {
  const Message m = departure(Message::Type::depart, rank, reason);
  if (tree_.is_root()) {
    depart(m);
  } else {
    outbox_.up(m, false);
  }
  outbox_.send_ready(false);
}

void Agreement::depart_alone(int rank, const Failure& reason) {
  const Message m = departure(Message::Type::lost, rank, reason);
  // Rank 0 may have ended, and then its messages do not reach the hosts below this rank's host.
  if (speaks()) outbox_.down(m);
  if (world_.rank() == 0) {
    outbox_.past_children(m);
  } else {
    outbox_.to_rank_0(m);
  }
  outbox_.send_ready(false);
}

void Agreement::progress_sending() { send_ready(); }

bool Agreement::progress() {
  bool taken = false;
  int from = 0;
  std::vector<char> buffer;
  for (int i = 0; i < kMostTaken && inbox_.take(&buffer, &from); ++i) {
    taken = true;
    received_.add(buffer.size());
    for (Message& message : decode(buffer.data(), buffer.size())) handle(std::move(message), from);
  }
  return send_ready() || taken;
}

// Announcements are held back while earlier announcements have no answer, so that a step's operations share messages.
bool Agreement::send_ready() { return outbox_.send_ready(outstanding_.count() > outbox_.held()); }

void Agreement::handle(Message m, int from) {
  switch (m.type) {
    case Message::Type::announce:
      collect(std::move(m), from);
      return;
    case Message::Type::verdict:
      outbox_.down(m);
      take_verdict(std::move(m));
      return;
    case Message::Type::depart:
    case Message::Type::lost:
      if (tree_.is_root() || from == tree_.parent() || from == 0) {
        depart(m);
      } else {
        outbox_.up(m, false);  // rank 0 decides in which order departures and verdicts take effect
      }
      return;
    case Message::Type::give_up:
      if (tree_.is_root()) decide_end(m);
      return;
    case Message::Type::end:
      outbox_.down(m);
      end(m);
      return;
    case Message::Type::ended:
      take_ended(m, from);
      return;
  }
}

void Agreement::take_verdict(Message m) {
  const std::pair key{m.key.high, m.key.low};
  outstanding_.remove(key);
  const bool has_result = !m.values.empty();
  if (has_result) results_[key] = std::move(m.values);
  if (table_.agree(m.key, m.number, m.error, m.placement, has_result)) return;
  results_.erase(key);
  // The other hosts begin the operation, but this host cannot. So this rank fails, and its failure tells them so.
  if (table_.departed_rank() >= 0) throw table_.departed();
}

// Rank 0 sends the departure to every host, even to the sender, in order with its verdicts. So all hosts agree on the
// same operations before this message, and on none after it.
void Agreement::depart(const Message& m) {
  if (tree_.is_root() && departed_.empty()) {
    departed_ = Departed(static_cast<int>(m.number), m.error).failure();
    give_verdicts();
  }
  if (!closed_) {
    outbox_.down(m);
    outstanding_.clear();
    closed_ = true;
    table_.close(static_cast<int>(m.number), m.error);
  }
  if (tree_.is_root() && tree_.is_deep() && m.type == Message::Type::lost) outbox_.past_children(m);
}

void Agreement::give_up(const Key& key, const Failure& reason) {
  Message m;
  m.type = Message::Type::give_up;
  m.key = key;
  m.error = reason;
  if (world_.rank() == 0) {
    decide_end(m);
  } else {
    outbox_.to_rank_0(m);
  }
}

void Agreement::decide_end(const Message& m) {
  for (const auto& [position, ready] : ready_) {
    if (ready.key == m.key) return;  // all hosts have announced it
  }
  const bool again = given_up_.count({m.key.high, m.key.low}) > 0;
  tell_end(m.key, m.error, again);
}

// Tells this host and the hosts below.
void Agreement::tell_end(const Key& key, const Failure& reason, bool again) {
  Message m;
  m.type = Message::Type::end;
  m.key = key;
  m.number = again ? 1 : 0;
  m.error = reason;
  outbox_.down(m);
  end(m);
}

// Runs on every host. If this host announced the operation after rank 0 had sent `end`, the host above sends `end`
// again when it receives the announcement.
void Agreement::end(const Message& m) {
  const std::pair key{m.key.high, m.key.low};
  if (m.number == 0 && (tree_.is_root() || !tree_.children().empty())) {
    GivenUp& given_up = given_up_[key];
    given_up.reason = m.error;
    given_up.left = {tree_.children().begin(), tree_.children().end()};
    given_up.left.insert(world_.rank());
    pending_.erase(key);
  }
  const bool announced = outstanding_.remove(key);
  if (!table_.give_up(m.key, m.error, announced)) return;
  Message ended;
  ended.type = Message::Type::ended;
  ended.key = m.key;
  take_ended(ended, world_.rank());
}

// A branch of the tree has ended the operation. When all branches have, tells the host above.
void Agreement::take_ended(const Message& m, int from) {
  const auto it = given_up_.find({m.key.high, m.key.low});
  if (it != given_up_.end()) {
    it->second.left.erase(from);
    if (!it->second.left.empty()) return;
    given_up_.erase(it);
  } else if (tree_.is_root() || !tree_.children().empty()) {
    return;
  }
  if (!tree_.is_root()) outbox_.up(m, false);
}

std::vector<ArrivalRecord> Agreement::take_arrivals(const Key& key) {
  auto taken = observed_.arrivals.extract({key.high, key.low});
  return taken.empty() ? std::vector<ArrivalRecord>() : std::move(taken.mapped());
}

void Agreement::collect(Message m, int from) {
  const std::pair key{m.key.high, m.key.low};
  const size_t branch = tree_.branch_of(from);
  if (m.has_texts) texts_.add(m.number, {m.name, m.signature});
  if (const auto it = given_up_.find(key); it != given_up_.end()) {
    pending_.erase(key);
    const Failure reason = it->second.reason;
    tell_end(m.key, reason, true);
    return;
  }
  Pending& p = pending_[key];
  if (p.branches == 0) {
    p.text = m.number;
    p.rank = world_.label(from);
    p.priority = m.priority;
  }
  if (m.placement != 0) {
    const uint64_t of[2] = {static_cast<uint64_t>(from), m.placement};
    p.placement += hash_bytes(of, sizeof of, 0);
  }
  if (!m.error.empty()) p.error = m.error;  // a host's own error says more than the comparison below
  if (p.error.empty() && p.text != m.number) {
    const KnownTexts::Texts one = texts_.get(p.text), other = texts_.get(m.number);
    const int rank = world_.label(from);
    p.error = {difference(one.name, p.rank, one.signature, rank, other.signature), ErrorCode::mismatch, {p.rank, rank}};
  }
  if (!m.values.empty()) {
    p.values.resize(tree_.branches());
    p.values[branch] = std::move(m.values);
  }
  const int64_t now = now_ns();
  observed_.late.announced(&p.meeting, m, branch, now);
  if (Timeline::on()) p.arrivals.push_back({world_.label(from), now});
  if (++p.branches < tree_.branches()) return;
  Pending complete = std::move(p);
  pending_.erase(key);
  if (tree_.is_root()) {
    decide(m.key, std::move(complete), now);
  } else {
    announce_part(m.key, complete, now);
  }
}

// Announces an operation to the host above, after this host and all hosts below it have announced it.
void Agreement::announce_part(const Key& key, const Pending& pending, int64_t now) {
  Message m;
  m.type = Message::Type::announce;
  m.key = key;
  m.number = pending.text;
  m.priority = pending.priority;
  m.placement = pending.placement;
  m.error = pending.error;
  if (m.error.empty()) m.values = combined(pending, false);
  m.late_rank = pending.meeting.last;
  if (m.late_rank >= 0) m.waited_ns = std::min(observed_.late.waited(pending.meeting, now), Message::kMostWaited);
  if (told_.above.size() >= KnownTexts::kRemembered) told_.above.clear();
  if (told_.above.insert(m.number).second) {
    const KnownTexts::Texts texts = texts_.get(m.number);
    m.has_texts = true;
    m.name = texts.name;
    m.signature = texts.signature;
  }
  // A single small operation is sent at once, since a rank may be waiting for it. Several in a row share messages.
  outbox_.up(m, m.error.empty() && !(pending.carried && outstanding_.carried() <= 1));
}

// On rank 0: all hosts have announced the operation, so it fails or becomes ready.
void Agreement::decide(const Key& key, Pending pending, int64_t now) {
  if (!Timeline::on()) observed_.arrivals.clear();
  if (!pending.error.empty()) {
    give_verdict(key, 0, pending, pending.error);
  } else if (!departed_.empty()) {
    give_verdict(key, 0, pending, shown_name(texts_.get(pending.text).name) + ": " + departed_);
  } else {
    observed_.late.complete(pending.meeting, now);
    ready_.emplace(std::make_pair(-int64_t{pending.priority}, ready_count_++), Ready{key, std::move(pending)});
    give_verdicts();
  }
}

// Combines the values of a carried operation from all branches that have announced it, in the order of the tree; empty
// for other operations. `whole`: all hosts are included, so this is the result.
std::vector<char> Agreement::combined(const Pending& pending, bool whole) const {
  if (!pending.carried) return {};
  const Operation& op = *pending.carried;
  const DType type = op.kind == Kind::broadcast ? op.dtype : partial_type(op.dtype, op.reduce_op);
  const size_t bytes = op.count * item_size(type);
  std::vector<const void*> inputs;
  for (const std::vector<char>& values : pending.values) {
    if (values.empty()) continue;
    if (values.size() != bytes) throw Error("mykv received values of another size than announced");
    inputs.push_back(values.data());
  }
  const bool all = op.kind == Kind::broadcast ? inputs.size() == 1 : inputs.size() == tree_.branches();
  if (!all && (op.kind != Kind::broadcast || tree_.is_root())) {
    throw Error("mykv received an announcement without its values");
  }
  if (inputs.empty()) return {};
  std::vector<char> result(bytes);
  void* output = result.data();
  const double scale = whole && op.kind != Kind::broadcast ? op.scale : 1.0;
  reduce(type, op.reduce_op, inputs.data(), static_cast<int>(inputs.size()), &output, 1, op.count, scale);
  if (!whole || type == op.dtype) return result;
  std::vector<char> rounded(op.bytes());
  convert(op.dtype, rounded.data(), type, result.data(), op.count);
  return rounded;
}

// Gives verdicts to ready operations within most_bytes_. At least two operations, however large, have a verdict and are
// not done: otherwise the network would be idle while the next verdict is sent. Once the limit is reached, verdicts
// wait until half of the bytes are done, so that several verdicts share messages. When a rank has left, all ready
// operations get their verdict, since all hosts have already announced them.
void Agreement::give_verdicts() {
  if (under_way_.bytes.size() < 2 || under_way_.all_bytes <= most_bytes_ / 2) under_way_.is_full = false;
  while (!ready_.empty()) {
    const auto first = ready_.begin();
    const size_t bytes = first->second.pending.bytes;
    const bool crowded = under_way_.bytes.size() > 1 && under_way_.all_bytes + bytes > most_bytes_;
    under_way_.is_full |= bytes > 0 && crowded;
    if (bytes > 0 && under_way_.is_full && departed_.empty()) return;
    const Ready next = std::move(first->second);
    ready_.erase(first);
    const uint64_t sequence = next_sequence_;
    next_sequence_ += next.pending.sequence_numbers;
    if (bytes > 0) under_way_.bytes[sequence] = bytes;
    under_way_.all_bytes += bytes;
    if (!next.pending.arrivals.empty()) observed_.arrivals[{next.key.high, next.key.low}] = next.pending.arrivals;
    give_verdict(next.key, sequence, next.pending, {});
  }
}

void Agreement::give_verdict(const Key& key, uint64_t sequence, const Pending& of, const Failure& error) {
  Message verdict;
  verdict.type = Message::Type::verdict;
  verdict.key = key;
  verdict.number = sequence;
  verdict.error = error;
  if (error.empty()) {
    verdict.placement = of.placement;
    verdict.values = combined(of, true);
  }
  handle(std::move(verdict), world_.rank());
}

}  // namespace mykv
