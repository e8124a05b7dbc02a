#include "transport/mpi/mpi_transport.h"

#include <algorithm>

#include "transport/mpi/slice_exchange.h"

namespace mykv {

MpiTransport::MpiTransport(const World& world, Rendezvous& rendezvous)
    : world_(world), rendezvous_(rendezvous), slots_(world.segment().base(), rendezvous) {
  size_t smallest = world.hosts()[0].size();
  for (const std::vector<int>& ranks : world.hosts()) smallest = std::min(smallest, ranks.size());
  slices_ = static_cast<uint32_t>(smallest);
}

MpiTransport::~MpiTransport() {
  // MPI may still write into what an unfinished exchange received; such memory is never given back.
  for (auto& exchange : exchanges_) (void)exchange.release();
}

void MpiTransport::start(uint32_t entry, const Share&) {
  if (static_cast<uint32_t>(world_.local_rank()) >= slices_) return;
  Stamps* const stamps = rendezvous_.stamping() ? &rendezvous_.my_stamps(rendezvous_.entry(entry)) : nullptr;
  exchanges_.push_back(
      std::make_unique<SliceExchange>(world_, slots_, rendezvous_.entry(entry), entry, slices_, stamps));
}

bool MpiTransport::progress() {
  for (auto it = exchanges_.begin(); it != exchanges_.end(); ++it) {
    if (!(*it)->step()) continue;
    if ((*it)->finished()) {
      const uint32_t entry = (*it)->index();
      exchanges_.erase(it);
      rendezvous_.finish_chunks(entry, 1);
    }
    return true;
  }
  return false;
}

}  // namespace mykv
