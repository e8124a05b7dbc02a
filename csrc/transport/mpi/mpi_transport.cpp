#include "transport/mpi/mpi_transport.h"

#include <algorithm>

#include "memory/kept.h"

namespace mykv {

namespace {

constexpr size_t kMostChunks = 256;  // under way at once: each is looked at again and again

}  // namespace

MpiTransport::MpiTransport(const World& world, Rendezvous& rendezvous, size_t network_bytes)
    : world_(world),
      rendezvous_(rendezvous),
      slots_(world.segment().base(), rendezvous),
      network_bytes_(network_bytes),
      messages_(world.data()) {
  size_t smallest = world.hosts()[0].size();
  for (const std::vector<int>& ranks : world.hosts()) smallest = std::min(smallest, ranks.size());
  slices_ = static_cast<uint32_t>(smallest);
}

MpiTransport::~MpiTransport() {
  // MPI may still write into what an unfinished exchange receives; such memory is never given back.
  for (auto& chunk : chunks_) keep_for_good(std::move(chunk));
}

void MpiTransport::start(uint32_t index, const Share& share) {
  if (static_cast<uint32_t>(world_.local_rank()) >= slices_) return;
  Entry& entry = rendezvous_.entry(index);
  Stamps* const stamps = rendezvous_.stamping() ? &rendezvous_.my_stamps(entry) : nullptr;
  auto exchange = std::make_unique<SliceExchange>(world_, slots_, entry, index, slices_, stamps, share.compression);
  // They come in order, unless this rank lagged so far behind that it looked at all its entries instead of the log.
  auto place = exchanges_.end();
  const auto first = exchanges_.begin() + static_cast<std::ptrdiff_t>(entering_ + (next_chunk_ > 0));
  while (place != first && (*(place - 1))->sequence() > exchange->sequence()) --place;
  exchanges_.insert(place, std::move(exchange));
}

bool MpiTransport::progress() {
  const bool moved = messages_.poll();
  return step_chunks(false) || admit() || step_chunks(true) || moved;
}

bool MpiTransport::step_chunks(bool spreading_too) {
  for (size_t i = 0; i < chunks_.size(); ++i) {
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
  chunks_.push_back(std::make_unique<Chunk>(exchange, next_chunk_, messages_, staging_));
  chunk_bytes_ += chunks_.back()->bytes();
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
  rendezvous_.finish_chunks(index, 1);
}

}  // namespace mykv
