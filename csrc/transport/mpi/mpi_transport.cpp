#include "transport/mpi/mpi_transport.h"

#include <algorithm>
#include <utility>

#include "agreement/messages.h"
#include "base/clock.h"
#include "base/forks.h"
#include "base/planted_faults.h"
#include "timeline/records.h"

namespace mykv {

namespace {

constexpr size_t kMostChunks = 256;       // most chunks under way, which are polled together
constexpr int64_t kHearNs = 10000000;     // longest interval between checks for notices while messages arrive
constexpr int64_t kAwayNs = 500000000;    // a longer gap between two checks means that this process was stopped
constexpr int64_t kListenNs = 100000000;  // how long this rank then polls for notices only
// Most bytes of an operation whose values are sent in the agreement's messages: of one host, and of all hosts (or of
// the fan-out) together. For more bytes an exchange of slices is faster, although it needs two more messages in a row.
constexpr size_t kCarriedBytes = 16 << 10;
constexpr size_t kAllCarriedBytes = 32 << 10;
constexpr int kLooks = 16;  // checks for notices in one call; each advances a few messages

}  // namespace

MpiTransport::MpiTransport(const World& world, HostTable& table, const NetworkOptions& options)
    : world_(world),
      table_(table),
      slots_(world.segment().base(), table),
      most_{options.bytes,
            std::min(kCarriedBytes, kAllCarriedBytes / std::min(world.hosts().size() - 1, options.fan_out)),
            options.most_in_a_row},
      requests_(world.data()),
      notices_(world.control(), kNoticeTag) {
  size_t smallest = world.hosts()[0].size();
  for (const std::vector<int>& ranks : world.hosts()) smallest = std::min(smallest, ranks.size());
  slices_ = static_cast<uint32_t>(smallest);
}

MpiTransport::~MpiTransport() {
  // MPI may still write into the memory of an unfinished exchange, which is therefore never freed.
  for (auto& chunk : chunks_) keep_forever(std::move(chunk));
  if (!notice_.requests.empty()) keep_forever(std::move(notice_));
}

bool MpiTransport::is_carried(const Operation& op) const {
  if (op.kind != Kind::allreduce && op.kind != Kind::broadcast) return false;
  return op.road != DataPath::nccl && !op.wire && op.compressor == nullptr && op.count > 0 &&
         op.count * item_size(partial_type(op.dtype, op.reduce_op)) <= most_.carried;
}

// Compressed values use one row: a single host reduces each value, and keeps the part of it that compression loses.
HostGrid MpiTransport::grid_of(const Operation& op) const {
  const size_t hosts = world_.hosts().size();
  const bool squares = SliceExchange::divides(op) && op.compressor == nullptr && hosts > most_.in_a_row;
  return squares ? HostGrid::square(hosts) : HostGrid(hosts, 1);
}

bool MpiTransport::own_share(uint32_t index, std::vector<char>* values) const {
  Entry& entry = table_.entry(index);
  const Operation& op = entry.operation;
  const bool reduces = op.kind == Kind::allreduce;
  if (reduces || world_.host_of(op.root) == world_.host()) {
    if (reduces) {
      values->resize(op.count * item_size(partial_type(op.dtype, op.reduce_op)));
      slots_.sum_into(entry, 0, op.count, values->data());
    } else {
      values->resize(op.bytes());
      copy(values->data(), slots_.slot(entry, world_.local_rank_of(op.root)), op.bytes());
    }
  }
  // No other host may get values that were read after a stop, when ranks may use their slots again.
  std::atomic_thread_fence(std::memory_order_acquire);
  return (entry.next_chunk.load(std::memory_order_acquire) & kStopped) == 0;
}

void MpiTransport::put_result(uint32_t index, const std::vector<char>& values) {
  if (!table_.claim_chunk(index)) throw table_.departed();
  Entry& entry = table_.entry(index);
  if (values.size() != entry.operation.bytes()) throw Error("mykv received the end of an operation without its result");
  Stamps* const stamps = table_.stamping() ? &table_.my_stamps(entry) : nullptr;
  if (stamps != nullptr) stamps->set(Stamp::begun);
  slots_.fill(entry, values.data());
  if (stamps != nullptr) stamps->set(Stamp::finished);
  table_.finish_pieces(index, 1);
}

void MpiTransport::start(uint32_t index, const LocalShare& share) {
  Entry& entry = table_.entry(index);
  if (static_cast<uint32_t>(world_.local_rank()) >= slices_ || is_carried(entry.operation)) return;
  if (!table_.claim_chunk(index)) throw table_.departed();
  Stamps* const stamps = table_.stamping() ? &table_.my_stamps(entry) : nullptr;
  auto exchange = std::make_unique<SliceExchange>(world_, slots_, entry, index, slices_, grid_of(entry.operation),
                                                  stamps, share.compression);
  // Entries come in the agreed order, unless this rank has missed events of the log, and so has read all entries
  // instead.
  auto position = exchanges_.end();
  const auto first = exchanges_.begin() + static_cast<std::ptrdiff_t>(entering_ + (next_chunk_ > 0));
  while (position != first && (*(position - 1))->sequence() > exchange->sequence()) --position;
  exchanges_.insert(position, std::move(exchange));
}

bool MpiTransport::progress() {
  const int64_t now = coarse_now_ns();
  const bool away = now - std::exchange(looked_, now) > kAwayNs;
  if (exchanges_.empty()) {
    heard_at_ = 0;  // the next operation begins by polling for notices
    return requests_.poll();
  }
  // While this process was stopped, other ranks may have given up its operations, and reused the memory that they had
  // sent from. Before that, they have sent notices.
  if (away) listen_until_ = now + kListenNs;
  if (now < listen_until_) {
    for (int look = 0; look < kLooks; ++look) require_all();
    return false;
  }
  // Notices are read before any received value is used.
  if (now - heard_at_ > kHearNs) {
    heard_at_ = now;
    require_all();
  }
  const bool moved = requests_.poll();
  if (step_chunks(false) || admit() || step_chunks(true) || moved) return true;
  require_all();
  return false;
}

bool MpiTransport::step_chunks(bool spreading_too) {
  for (size_t i = 0; i < chunks_.size(); ++i) {
    if (chunks_[i]->exchange().is_stopped()) throw table_.departed();
    if (!chunks_[i]->step(spreading_too)) continue;
    if (chunks_[i]->finished()) finish(i);
    return true;
  }
  return false;
}

// Starts the next chunk, if the limits allow.
bool MpiTransport::admit() {
  if (entering_ == exchanges_.size()) return false;
  if (chunk_bytes_ >= most_.under_way || chunks_.size() >= kMostChunks) return false;
  SliceExchange& exchange = *exchanges_[entering_];
  if (exchange.is_stopped()) throw table_.departed();
  chunks_.push_back(std::make_unique<Chunk>(exchange, next_chunk_, requests_, staging_));
  chunk_bytes_ += chunks_.back()->bytes();
  chunks_.back()->begin();
  if (++next_chunk_ == exchange.chunks()) {
    next_chunk_ = 0;
    ++entering_;
  }
  return true;
}

void MpiTransport::finish(size_t at) {
  Chunk& chunk = *chunks_[at];
  SliceExchange& exchange = chunk.exchange();
  chunk_bytes_ -= chunk.bytes();
  chunk.release();
  chunks_.erase(chunks_.begin() + static_cast<std::ptrdiff_t>(at));
  if (!exchange.finish_chunk()) return;
  exchange.stamp(Stamp::finished);
  const uint32_t index = exchange.index();
  const auto over =
      std::find_if(exchanges_.begin(), exchanges_.end(), [&](auto& one) { return one.get() == &exchange; });
  exchanges_.erase(over);
  --entering_;  // all its chunks have been started
  table_.finish_pieces(index, 1);
}

bool MpiTransport::holds(uint32_t entry) const {
  return std::any_of(exchanges_.begin(), exchanges_.end(), [&](const auto& one) { return one->index() == entry; });
}

// Reads notices of ranks that have left. The first notice counts.
void MpiTransport::hear() {
  std::vector<char> bytes;
  int from = 0;
  while (notices_.take(&bytes, &from)) {
    for (const Message& message : decode(bytes.data(), bytes.size())) {
      if (message.type != Message::Type::depart) continue;
      if (!departed_) departed_.emplace(static_cast<int>(message.number), message.error);
    }
    gone_.insert(from);
  }
}

// Throws if any owner of this slice has left: every exchange needs all of them.
void MpiTransport::require_all() {
  hear();
  if (departed_) throw Departed(*departed_);
}

void MpiTransport::note_departed(const Departed& departed) {
  requests_.cancel();
  if (static_cast<uint32_t>(world_.local_rank()) >= slices_) return;  // no other host waits for this rank
  if (testing::is_planted(testing::Fault::notice)) return;
  Message message;
  message.type = Message::Type::depart;
  message.number = static_cast<uint64_t>(departed.rank);
  message.error = departed.reason;
  encode(message, &notice_.bytes);
  const int size = static_cast<int>(notice_.bytes.size());
  for (const std::vector<int>& ranks : world_.hosts()) {
    const int to = ranks[static_cast<size_t>(world_.local_rank())];
    if (to == world_.rank()) continue;
    notice_.requests.push_back(MPI_REQUEST_NULL);
    MPI_Isend(notice_.bytes.data(), size, MPI_BYTE, to, kNoticeTag, world_.control(), &notice_.requests.back());
  }
}

// Messages to a rank that has also left need not end, since no rank reads them. This rank keeps their memory as long as
// MPI may use it; see the destructor.
bool MpiTransport::uses_no_memory() {
  try {
    hear();
  } catch (const Error&) {
    // MPI, or a message, is unusable; the state of the other messages can still be seen.
  }
  int sent = 0;
  MPI_Testall(static_cast<int>(notice_.requests.size()), notice_.requests.data(), &sent, MPI_STATUSES_IGNORE);
  if (sent) notice_.requests.clear();
  if (!requests_.only_to(gone_)) return false;
  if (!std::exchange(dropped_, true)) {
    for (const auto& exchange : exchanges_) table_.drop_chunk(exchange->index());
  }
  if (requests_.empty()) {
    chunks_.clear();
    exchanges_.clear();
  }
  return sent != 0;
}

}  // namespace mykv
