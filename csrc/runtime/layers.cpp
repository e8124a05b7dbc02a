#include "runtime/layers.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/mpi_check.h"
#include "operations/overlap.h"
#include "operations/ranges.h"
#include "operations/signature.h"
#include "runtime/runtime.h"
#include "transport/nccl/plan.h"
#include "world/revoke_on_death.h"

namespace mykv {

namespace {

const std::string kBetween = "between hosts: ";        // precedes an error of that layer, alike on all hosts
constexpr size_t kMostAddressSpace = size_t{1} << 40;  // as of process sets

// A runtime for the ranks with this color. Collective.
std::shared_ptr<Runtime> runtime_of(const World& world, const std::vector<int>& ranks, int color, int key,
                                    RuntimeOptions options, const char* road) {
  MPI_Comm comm;
  {
    const RevokeOnDeath meeting(world.control());
    check_mpi(MPI_Comm_split(world.control(), color, key, &comm), "MPI_Comm_split");
  }
  const Communicator made(comm);
  options.world.labels = world.labels(ranks);
  options.world.most_address_space = kMostAddressSpace;
  options.gpu.road = road;
  return std::make_shared<Runtime>(comm, options);
}

// The overlaps of the places with the shard; element to.begin of the operation becomes element `begin`.
template <class Place>
std::vector<Place> clipped(const std::vector<Place>& places, const Shard& to, size_t width, size_t begin) {
  std::vector<Place> inside;
  for_overlaps(places, Range{to.begin, to.begin + to.count}, [&](const Place& place, const Range& both) {
    Place one = place;
    one.data = address_in(place, both.begin, width);
    one.begin = both.begin - to.begin + begin;
    one.count = both.count();
    inside.push_back(one);
  });
  return inside;
}

std::vector<Source> as_sources(const std::vector<Target>& targets) {
  std::vector<Source> sources;
  for (const Target& target : targets) sources.push_back({target.begin, target.count, target.data});
  return sources;
}

std::shared_ptr<const DeviceMemory> on_device(int device, const Request& request) {
  auto devices = std::make_shared<DeviceMemory>();
  devices->device = device;
  devices->inputs.assign(request.sources.size(), device);
  devices->outputs.assign(request.targets.size(), device);
  return devices;
}

}  // namespace

struct Layers::Going {
  Going(Runtime& of, Request given) : world(of), request(std::move(given)) {}

  Runtime& world;
  Request request;  // from begin() on its sources and targets name all of its memory
  uint8_t fits = 0;
  uint8_t all_fit = 0;
  int device = -1;
  int layer = 0;
  bool failed_within = false;  // already in the first layer, within the host
  Cause error;

  // The error of a layer without the operation's name, which the next layer adds again.
  std::string relayed() const {
    const std::string name = shown_name(request.name);
    if (error.text.compare(0, name.size(), name) != 0) return error.text;
    for (const std::string after : {": ", " was "}) {
      if (error.text.compare(name.size(), after.size(), after) == 0)
        return error.text.substr(name.size() + after.size());
    }
    return error.text;
  }
};

Layers::Layers(const World& world, const RuntimeOptions& options)
    : rank_(world.local_rank()), size_(world.local_size()) {
  RuntimeOptions here = options, across = options;
  here.world.virtual_hosts = 1;
  std::string failure;  // exchanged below: otherwise the other hosts would wait for this host
  try {
    const std::vector<int>& ranks = world.hosts()[static_cast<size_t>(world.host())];
    host_ = runtime_of(world, ranks, world.host(), world.rank(), here, "nccl");
    if (!host_->gpus().nccl) throw Error("NCCL does not serve the ranks of a host: " + host_->gpus().reason);
  } catch (const Error& error) {
    failure = error.what();
  }
  world.throw_failures(failure);
  // Each rank of this runtime counts as a host of its own, also if several run on one machine.
  across.world.virtual_hosts = static_cast<int>(world.hosts().size());
  std::vector<int> ranks;
  for (const std::vector<int>& host : world.hosts()) ranks.push_back(host[static_cast<size_t>(rank_)]);
  try {
    between_ = runtime_of(world, ranks, rank_, world.host(), across, "host");
  } catch (const Error& error) {
    failure = error.what();
  }
  world.throw_failures(failure);
}

// Whether NCCL can reduce the memory of this rank: it lies on one GPU, as one input and one output, or as targets that
// cover the operation.
bool Layers::fits(const Request& request) const {
  if (!gpu::on_one_gpu(*request.devices) || !overlap_in_part(request).empty()) return false;
  if (!request.scattered) return request.inputs.size() == 1 && request.outputs.size() == 1;
  size_t covered = 0;
  for (const Target& target : request.targets) covered += target.count;
  return covered == request.operation.count;
}

Shard Layers::shard_of(size_t count, int rank) const {
  const auto size = static_cast<size_t>(size_), r = static_cast<size_t>(rank);
  const size_t begin = count / size * r + std::min(r, count % size);
  return {begin, count / size + (r < count % size ? 1 : 0), rank};
}

void Layers::post(Runtime& world, Request request) {
  const auto going = std::make_shared<Going>(world, std::move(request));
  const Request& all = going->request;
  going->fits = fits(all);
  Request meeting;
  meeting.name = all.name;
  meeting.turn = all.turn;
  meeting.ticket = all.ticket;
  meeting.signature = all.signature;
  meeting.refusal = all.refusal;
  meeting.operation.set_arrays(DType::uint8, 1);
  meeting.operation.reduce_op = ReduceOp::min;
  meeting.operation.priority = all.operation.priority;
  meeting.inputs = {&going->fits};
  meeting.outputs = {&going->all_fit};
  meeting.done = [this, going](const Cause* error) {
    if (error != nullptr) {
      end(going, error);
    } else if (going->all_fit != 0) {
      begin(going);
    } else {
      Request request = going->request;
      request.name += " through host memory";
      request.operation.road = Road::staged;
      request.done = [this, going](const Cause* failure) { end(going, failure); };
      going->world.post(std::move(request));
    }
  };
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++going_;
  }
  world.post(std::move(meeting));
}

void Layers::wait(std::chrono::steady_clock::duration patience) {
  std::unique_lock<std::mutex> lock(mutex_);
  ended_.wait_for(lock, patience, [&] { return going_ == 0; });
}

void Layers::end(const std::shared_ptr<Going>& going, const Cause* error) {
  going->request.ticket.reset();
  going->request.done(error);
  std::lock_guard<std::mutex> lock(mutex_);
  --going_;
  ended_.notify_all();
}

void Layers::begin(const std::shared_ptr<Going>& going) {
  Request& all = going->request;
  const size_t count = all.operation.count;
  if (!all.scattered) {
    for (const void* input : all.inputs) all.sources.push_back({0, count, input});
    for (void* output : all.outputs) all.targets.push_back({0, count, output});
  }
  const std::vector<int>& devices = all.devices->inputs.empty() ? all.devices->outputs : all.devices->inputs;
  if (!devices.empty()) going->device = devices[0];
  next(going);
}

// Every rank posts every layer, with a refusal if an earlier layer has failed, so that no rank waits for the ranks that
// know of the failure. If the first layer has failed, all ranks of the host know, and skip the last one.
void Layers::next(const std::shared_ptr<Going>& going) {
  constexpr int kLayers = 3;
  if (going->layer == kLayers || (going->layer == kLayers - 1 && going->failed_within)) {
    end(going, going->error.empty() ? nullptr : &going->error);
    return;
  }
  const int layer = going->layer++;
  Request request = layer == 1 ? between(*going) : within(*going, layer == 2);
  request.name = going->request.name;
  request.turn = going->request.turn;
  request.ticket = going->request.ticket;
  request.signature = going->request.signature;
  request.owner = going->request.owner;
  request.operation.priority = going->request.operation.priority;
  const bool failed_before = !going->error.empty();
  if (failed_before) request.refusal = (layer == kLayers - 1 ? kBetween : "") + going->relayed();
  Runtime& runtime = layer == 1 ? *between_ : *host_;
  request.done = [this, going, layer, failed_before, &runtime](const Cause* error) {
    if (error != nullptr && going->error.empty()) going->error = *error;
    if (error != nullptr && layer == 0) going->failed_within = true;
    // A rank whose runtime is broken leaves the world too. So do the ranks of a host that alone did not get the result:
    // they would continue with different values.
    Cause broken = error != nullptr ? runtime.broken() : Cause();
    const bool alone = error != nullptr && layer == kLayers - 1 && !failed_before &&
                       error->text.find(kBetween) == std::string::npos && !runtime.left();
    if (broken.empty() && alone) broken = *error;
    if (!broken.empty()) going->world.break_off(broken);
    next(going);
  };
  runtime.post(std::move(request));
}

// A request by NCCL on this host: the reduce to the shards, or (`back`) the broadcast from the shards.
Request Layers::within(const Going& going, bool back) const {
  const Request& all = going.request;
  const size_t width = item_size(all.operation.dtype), count = all.operation.count;
  Request request;
  request.operation = all.operation;
  request.operation.kind = back ? Kind::broadcast : Kind::reduce;
  request.operation.road = Road::nccl;
  request.operation.scale = 1.0;  // applied between hosts
  request.operation.wire.reset();
  request.operation.compressor = nullptr;
  auto shards = std::make_shared<std::vector<Shard>>();
  for (int r = 0; r < size_; ++r) shards->push_back(shard_of(count, r));
  const Shard& mine = (*shards)[static_cast<size_t>(rank_)];
  const std::vector<Target> own = clipped(all.targets, mine, width, mine.begin);
  request.sources = back ? as_sources(own) : all.sources;
  request.targets = back ? all.targets : own;
  request.scattered = true;
  request.shards = std::move(shards);
  auto devices = std::make_shared<DeviceMemory>(*on_device(going.device, request));
  if (!back) devices->after = all.devices->after;
  request.devices = std::move(devices);
  return request;
}

// A request through host memory and MPI, for this rank's shard.
Request Layers::between(const Going& going) const {
  const Request& all = going.request;
  const Shard mine = shard_of(all.operation.count, rank_);
  Request request;
  request.operation = all.operation;
  request.operation.count = mine.count;
  request.operation.road = Road::staged;
  request.targets = clipped(all.targets, mine, item_size(all.operation.dtype), 0);
  request.sources = as_sources(request.targets);
  request.scattered = true;
  request.devices = on_device(going.device, request);
  return request;
}

}  // namespace mykv
