#include "transport/host/host_transport.h"

#include <algorithm>

namespace mykv {

namespace {
constexpr size_t kInlineBytes = 32 << 10;  // below it, waking the runtime's thread costs more than the work
}  // namespace

HostTransport::HostTransport(const World& world, HostTable& table)
    : table_(table), slots_(world.segment().base(), table), chunk_bytes_(piece_bytes(table.local_size())) {}

int32_t HostTransport::owner(const Operation& operation, uint64_t number) const {
  if (operation.road == DataPath::staged) return kAnybody;  // all shares are in slots
  if (operation.kind == Kind::reduce && (operation.in_place || operation.bytes() > kInlineBytes)) return operation.root;
  const bool copied = operation.kind == Kind::allreduce && !operation.in_place && operation.bytes() > kInlineBytes;
  return copied ? static_cast<int32_t>(number % static_cast<uint64_t>(table_.local_size())) : kAnybody;
}

bool HostTransport::taken_from_root(const Operation& operation) const {
  return operation.kind == Kind::broadcast && operation.bytes() > kInlineBytes && operation.road != DataPath::staged;
}

uint32_t HostTransport::pieces(const Operation& operation) const {
  if (taken_from_root(operation)) return static_cast<uint32_t>(table_.local_size());
  return static_cast<uint32_t>(std::max<size_t>(1, (operation.bytes() + chunk_bytes_ - 1) / chunk_bytes_));
}

size_t HostTransport::inline_limit() const { return std::min(kInlineBytes, chunk_bytes_); }

void HostTransport::start(uint32_t entry, const LocalShare& share) {
  const int32_t owner = table_.entry(entry).owner;
  if (owner == kAnybody ? !table_.works_on(entry) : owner != table_.local_rank()) return;
  if (running_.size() <= entry) running_.resize(entry + 1);
  running_[entry] = ++order_;
  ready_.push({table_.entry(entry).operation.priority, order_, entry, share});
}

bool HostTransport::progress() {
  while (!ready_.empty()) {
    const Item item = ready_.top();
    if (running_[item.entry] == item.order) {
      Entry& entry = table_.entry(item.entry);
      if (taken_from_root(entry.operation)) {
        ready_.pop();
        if (table_.stamping()) table_.my_stamps(entry).set(Stamp::begun);
        if (item.share.take) item.share.take(slots_.slot(entry, entry.operation.root));
        if (table_.stamping()) table_.my_stamps(entry).set(Stamp::finished);
        table_.finish_pieces(item.entry, 1);
        return true;
      }
      if (entry.owner != kAnybody) {
        ready_.pop();
        if (entry.next_chunk.fetch_add(entry.pieces_to_finish, std::memory_order_relaxed) >= entry.pieces_to_finish)
          continue;
        if (table_.stamping()) table_.my_stamps(entry).set(Stamp::begun);
        run_owned(entry, item.share);
        if (table_.stamping()) table_.my_stamps(entry).set(Stamp::finished);
        table_.finish_pieces(item.entry, entry.pieces_to_finish);
        return true;
      }
      const uint32_t chunk = entry.next_chunk.fetch_add(1, std::memory_order_relaxed);
      if (chunk < entry.pieces_to_finish) {
        if (table_.stamping()) table_.my_stamps(entry).set_once(Stamp::begun);
        run_chunk(entry, chunk);
        if (table_.stamping()) table_.my_stamps(entry).set(Stamp::finished);
        table_.finish_pieces(item.entry, 1);
        return true;
      }
    }
    ready_.pop();
  }
  return false;
}

void HostTransport::run_chunk(Entry& entry, uint32_t chunk) const {
  const size_t step = chunk_bytes_ / item_size(entry.operation.dtype);
  const size_t begin = chunk * step;
  slots_.combine(entry, begin, std::min(entry.operation.count, begin + step), entry.operation.root);
}

void HostTransport::run_owned(Entry& entry, const LocalShare& share) const {
  const size_t step = chunk_bytes_ / item_size(entry.operation.dtype);
  const size_t count = entry.operation.count;
  for (size_t begin = 0; begin < count; begin += step) {
    const size_t end = std::min(count, begin + step);
    if (share.input == nullptr) {
      slots_.combine(entry, begin, end, entry.operation.root);
    } else {
      slots_.combine_owned(entry, begin, end, share);
    }
  }
}

void HostTransport::run_whole(uint32_t index) const {
  Entry& entry = table_.entry(index);
  if (table_.stamping()) table_.my_stamps(entry).set(Stamp::begun);
  slots_.combine(entry, 0, entry.operation.count, entry.operation.root);
  if (table_.stamping()) table_.my_stamps(entry).set(Stamp::finished);
  table_.finish_pieces(index, entry.pieces_to_finish);
}

}  // namespace mykv
