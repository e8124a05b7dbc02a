#include "transport/nccl/nccl_transport.h"

#include <unistd.h>

#include <algorithm>

#include "base/error.h"
#include "base/forks.h"
#include "gpu/libraries.h"
#include "operations/request.h"
#include "operations/signature.h"

namespace mykv {

namespace {

// How long to wait for operations under way when a rank has left.
constexpr auto kLeavePatience = std::chrono::seconds(5);
constexpr int64_t kFinishUs = 1000000;  // how long to wait for the other ranks, to end communicators together
// How long to wait for the failure detector to name the lost process.
constexpr auto kLostPatience = std::chrono::seconds(1);
constexpr auto kAbortPatience = std::chrono::seconds(5);  // how long to wait for GPUs after an abort
constexpr useconds_t kAbortLookUs = 1000;

}  // namespace

void limit_to_ordered(gpu::GpuRoads* gpus, const World& world, const Launcher* launcher, bool is_world) {
  if (!gpus->nccl) return;
  if (launcher == nullptr) {
    gpus->reason = "the process set needs the world's order of launches, but the world has ended";
  } else if (!is_world &&
             (world.has_several_hosts() || launcher->local_ranks(world.labels(world.hosts()[0])).empty())) {
    gpus->reason = "the process set is on several hosts, where it cannot keep the world's order of launches";
  } else {
    return;
  }
  gpus->nccl = false;
}

NcclTransport::NcclTransport(const World& world, HostTable& table, std::shared_ptr<Launcher> launcher)
    : world_(world),
      table_(table),
      launcher_(std::move(launcher)),
      numbers_(table, launcher_->order(), launcher_->local_ranks(world.labels(world.host_ranks()))),
      arrangements_(world) {}

uint64_t NcclTransport::prepare(const Request& request) {
  if (const std::string overlap = overlap_in_part(request); !overlap.empty()) throw Error(overlap);
  const DeviceMemory& memory = *request.devices;
  if (usual_device_ < 0 && !memory.inputs.empty()) usual_device_ = memory.inputs[0];
  if (usual_device_ < 0 && !memory.outputs.empty()) usual_device_ = memory.outputs[0];
  if (usual_device_ < 0) usual_device_ = world_.local_rank() % gpu::cuda().device_count();
  const Placement placement = placement_for(request);
  reserve_scratch(request, placement, world_.rank(), *launcher_);
  return placement.digest();
}

Placement NcclTransport::placement_for(const Request& request) const {
  const int named = request.devices->device;
  return placement_of(request, world_.rank(), named >= 0 ? named : usual_device_);
}

void NcclTransport::start(uint32_t index, const LocalShare& share) {
  Entry& entry = table_.entry(index);
  Item item;
  item.entry = index;
  item.number = entry.records()[world_.local_rank()].launch;
  item.request = share.request;
  item.owner = share.request->owner;
  if (queued_.empty() && running_.empty()) moved_ = Clock::now();
  queued_.emplace(item.number, std::move(item));
}

void NcclTransport::stop(uint32_t entry) {
  const auto it =
      std::find_if(queued_.begin(), queued_.end(), [&](const auto& one) { return one.second.entry == entry; });
  if (it != queued_.end()) queued_.erase(it);
  // Releases the number even if this rank never saw that the entry was ready.
  const uint64_t number = numbers_.given(entry);
  if (launcher_ && number != 0) launcher_->release(number);
}

bool NcclTransport::holds(uint32_t entry) const {
  if (begun_ && queued_.begin()->second.entry == entry) return true;
  return std::any_of(running_.begin(), running_.end(), [&](const Item& item) { return item.entry == entry; });
}

bool NcclTransport::progress() {
  if (!polling()) return false;
  if (peer_lost_) {
    const int gone = table_.departed_rank();
    if (gone >= 0 && gone != world_.label(world_.rank())) throw table_.departed();
    if (Clock::now() - peer_lost_->first > kLostPatience) throw peer_lost_->second;
    return false;
  }
  try {
    return move();
  } catch (const gpu::PeerLost& error) {
    // NCCL does not name the peer. If the job can outlive a process, Runtime::lose() names it soon.
    peer_lost_.emplace(Clock::now(), error);
    return false;
  }
}

bool NcclTransport::move() {
  const bool moved = step_first() | finish();
  if (moved) {
    moved_ = Clock::now();
  } else {
    watch();
  }
  return moved;
}

// One step of the next launch: exchange the placements, create the communicator, launch.
bool NcclTransport::step_first() {
  if (queued_.empty()) return false;
  const auto first = queued_.begin();
  Item& item = first->second;
  if (!begun_ && !launcher_->is_next_launch(item.number, table_.bell(world_.local_rank()))) return false;
  if (!begun_) {
    item.placement = placement_for(*item.request);
    begun_ = true;
    Entry& entry = table_.entry(item.entry);
    if (table_.stamping()) table_.my_stamps(entry).set(Stamp::begun);
    if (arrangements_.find(entry.placement) == nullptr) arrangements_.begin(entry.placement, item.placement);
  }
  if (arrangements_.busy() && !arrangements_.step()) return false;
  const Arrangement& arrangement = *arrangements_.find(table_.entry(item.entry).placement);
  if (arrangement.problem.empty()) {
    if (!item.launch) {
      item.launch = std::make_unique<Launch>(*item.request, item.placement, arrangement, world_.rank(), *launcher_);
    }
    if (!item.launch->finish_calls()) return false;
  }
  begun_ = false;
  launcher_->release(item.number);
  Item taken = std::move(item);
  queued_.erase(first);
  if (arrangement.problem.empty()) {
    running_.push_back(std::move(taken));
  } else {
    table_.finish_refused(taken.entry, shown_name(taken.request->name) + ": " + arrangement.problem);
  }
  return true;
}

bool NcclTransport::finish() {
  const size_t before = running_.size();
  for (auto it = running_.begin(); it != running_.end();) {
    if (!it->launch->happened()) {
      ++it;
      continue;
    }
    const uint32_t entry = it->entry;
    it = running_.erase(it);
    if (table_.stamping()) table_.my_stamps(table_.entry(entry)).set(Stamp::finished);
    table_.finish_pieces(entry, 1);
  }
  return running_.size() < before;
}

// Throws if operations will never end: a communicator has failed, or a rank has left.
void NcclTransport::watch() {
  for (const auto& one : arrangements_.communicators()) one->calls_finished("an operation");
  const int gone = table_.departed_rank();
  if (gone < 0 || gone == world_.label(world_.rank()) || (running_.empty() && !begun_)) return;
  const Clock::time_point now = Clock::now();
  if (!gone_since_) gone_since_ = now;
  if (now - std::max(moved_, *gone_since_) > kLeavePatience) throw table_.departed();
}

void NcclTransport::forgo(const std::vector<uint32_t>& entries) {
  for (const auto& [number, item] : queued_) launcher_->release(number);
  for (const uint32_t entry : entries) {
    if (!numbers_.concerns(table_.entry(entry).operation)) continue;
    uint64_t number = 0;
    try {
      number = numbers_.forgo(entry);
    } catch (const Error&) {
      number = numbers_.given(entry);  // no rank changes a table after a verdict
    }
    if (number != 0) launcher_->release(number);
  }
}

// Whether the GPUs finish everything in the streams before `end`.
bool NcclTransport::wait_for(const Placement& placement, Clock::time_point end) const {
  try {
    for (const int device : placement.list()) {
      const auto last = launcher_->stream(device).record();
      while (!last->happened()) {
        if (Clock::now() > end) return false;
        usleep(kAbortLookUs);
      }
    }
  } catch (const std::exception&) {
    return false;  // the GPU has failed
  }
  return true;
}

void NcclTransport::leave(const std::vector<uint32_t>& entries) {
  if (begun_ || !running_.empty()) {
    abort(entries);
    return;
  }
  arrangements_.finish(kFinishUs);
  forgo(entries);
  queued_.clear();
  launcher_.reset();
}

void NcclTransport::abort(const std::vector<uint32_t>& entries) noexcept {
  if (!launcher_) return;
  arrangements_.abort();
  forgo(entries);
  if (begun_) running_.push_back(std::move(queued_.begin()->second));
  const auto end = Clock::now() + kAbortPatience;
  for (const Item& item : running_) {
    if (wait_for(item.placement, end)) continue;
    keep_forever(item.owner);
    launcher_->keep();
  }
  queued_.clear();
  running_.clear();
  begun_ = false;
  launcher_.reset();
}

}  // namespace mykv
