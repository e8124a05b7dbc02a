#include "transport/mpi/mpi_transport.h"

#include <algorithm>
#include <utility>

#include "agreement/messages.h"
#include "base/clock.h"
#include "base/keep_forever.h"
#include "base/planted_faults.h"
#include "timeline/stamps.h"

namespace mykv {

namespace {

constexpr size_t kMostChunks = 256;       // under way at once: each is looked at again and again
constexpr int64_t kHearNs = 10000000;     // between looks for notices while messages come, at most
constexpr int64_t kAwayNs = 500000000;    // between two looks at the network: this process was stopped
constexpr int64_t kListenNs = 100000000;  // after that, for what the others have said meanwhile
constexpr int kLooks = 16;                // at the network, in one go: a look brings a few messages on

}  // namespace

MpiTransport::MpiTransport(const World& world, HostTable& table, size_t network_bytes)
    : world_(world),
      table_(table),
      slots_(world.segment().base(), table),
      network_bytes_(network_bytes),
      requests_(world.data()),
      notices_(world.control(), kNoticeTag) {
  size_t smallest = world.hosts()[0].size();
  for (const std::vector<int>& ranks : world.hosts()) smallest = std::min(smallest, ranks.size());
  slices_ = static_cast<uint32_t>(smallest);
}

MpiTransport::~MpiTransport() {
  // MPI may still write into what an unfinished exchange receives; such memory is never given back.
  for (auto& chunk : chunks_) keep_for_good(std::move(chunk));
  if (!notice_.requests.empty()) keep_for_good(std::move(notice_));
}

void MpiTransport::start(uint32_t index, const LocalShare& share) {
  if (static_cast<uint32_t>(world_.local_rank()) >= slices_) return;
  if (!table_.claim_chunk(index)) throw table_.departed();
  Entry& entry = table_.entry(index);
  Stamps* const stamps = table_.stamping() ? &table_.my_stamps(entry) : nullptr;
  auto exchange = std::make_unique<SliceExchange>(world_, slots_, entry, index, slices_, stamps, share.compression);
  // They come in order, unless this rank lagged so far behind that it looked at all its entries instead of the log.
  auto place = exchanges_.end();
  const auto first = exchanges_.begin() + static_cast<std::ptrdiff_t>(entering_ + (next_chunk_ > 0));
  while (place != first && (*(place - 1))->sequence() > exchange->sequence()) --place;
  exchanges_.insert(place, std::move(exchange));
}

bool MpiTransport::progress() {
  const int64_t now = coarse_now_ns();
  const bool away = now - std::exchange(looked_, now) > kAwayNs;
  if (exchanges_.empty()) {
    heard_at_ = 0;  // what begins next begins with a look
    return requests_.poll();
  }
  // While this process was stopped, others may have given up what it takes part in, and with it the memory out of which
  // they have sent. They have said so before.
  if (away) listen_until_ = now + kListenNs;
  if (now < listen_until_) {
    for (int look = 0; look < kLooks; ++look) require_all();
    return false;
  }
  // Before anything that has come is used.
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

// Lets the next chunk enter.
bool MpiTransport::admit() {
  if (entering_ == exchanges_.size()) return false;
  if (chunk_bytes_ >= network_bytes_ || chunks_.size() >= kMostChunks) return false;
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
  --entering_;  // all of its chunks had entered
  table_.finish_chunks(index, 1);
}

bool MpiTransport::holds(uint32_t entry) const {
  return std::any_of(exchanges_.begin(), exchanges_.end(), [&](const auto& one) { return one->index() == entry; });
}

// What others have said on the way out. The first one's words count.
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

// Every exchange needs all ranks that own the slice.
void MpiTransport::require_all() {
  hear();
  if (departed_) throw Departed(*departed_);
}

void MpiTransport::give_up(const Departed& departed) {
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

// What is on its way to a rank that is gone too is read by nobody. Memory of this rank's own stays as long as MPI may
// come near it; see the destructor.
bool MpiTransport::settled() {
  try {
    hear();
  } catch (const Error&) {
    // MPI is beyond use, or what it brings; how far it is with the rest can still be seen.
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
