#include "transport/nccl/plan.h"

#include <algorithm>
#include <fstream>
#include <set>
#include <string>

#include "base/error.h"
#include "gpu/libraries.h"
#include "operations/operation.h"
#include "operations/request.h"

namespace mykv {

namespace {

// A hash of the boot id, not of the host name: containers of one machine have different host names, and containers of
// different machines may have the same.
uint64_t machine_hash() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  file >> id;
  return hash_bytes(id.data(), id.size(), 0);
}

template <class Span>
uint64_t layout_of(const std::vector<Span>& spans, uint64_t seed) {
  for (const Span& span : spans) {
    const uint64_t numbers[2] = {span.begin, span.count};
    seed = hash_bytes(numbers, sizeof numbers, seed);
  }
  return hash_bytes(&seed, sizeof seed, spans.size());
}

template <class Span>
bool has_whole(const std::vector<Span>& spans, size_t count) {
  return std::any_of(spans.begin(), spans.end(),
                     [&](const Span& span) { return span.begin == 0 && span.count == count; });
}

}  // namespace

uint64_t Placement::digest() const {
  uint64_t hash = hash_bytes(devices, sizeof devices[0] * static_cast<size_t>(count), layout);
  const uint64_t rest[3] = {static_cast<uint64_t>(primary), whole_input, whole_output};
  hash = hash_bytes(rest, sizeof rest, hash);
  return hash == 0 ? 1 : hash;
}

Placement placement_of(const Request& request, int rank, int usual_device) {
  const DeviceMemory& memory = *request.devices;
  const Operation& op = request.operation;
  std::set<int> devices;
  int primary = usual_device;
  const bool sends = op.kind != Kind::broadcast || op.root == rank || request.scattered;
  if (!memory.inputs.empty() && (sends || memory.outputs.empty())) {
    primary = memory.inputs[0];
    devices.insert(memory.inputs.begin(), op.kind == Kind::broadcast ? memory.inputs.begin() + 1 : memory.inputs.end());
  } else if (!memory.outputs.empty()) {
    primary = memory.outputs[0];
  }
  if (request.scattered || op.kind == Kind::broadcast) devices.insert(memory.outputs.begin(), memory.outputs.end());
  // A reduce is computed on the GPU of the output if possible.
  if (!request.scattered && op.kind == Kind::reduce && !memory.outputs.empty() && devices.count(memory.outputs[0]) > 0)
    primary = memory.outputs[0];
  devices.insert(primary);
  if (devices.size() > Placement::kMostDevices) {
    throw Error("its arrays are on " + std::to_string(devices.size()) + " GPUs, but a rank can use only " +
                std::to_string(Placement::kMostDevices));
  }
  Placement placement;
  for (const int device : devices) {
    if (device == primary) placement.primary = placement.count;
    placement.devices[placement.count++] = device;
  }
  if (request.scattered) {
    if (op.kind == Kind::allreduce) placement.layout = layout_of(request.targets, layout_of(request.sources, 0));
    placement.whole_input = has_whole(request.sources, op.count);
    placement.whole_output = has_whole(request.targets, op.count);
  }
  return placement;
}

void identify(Placement* placement) {
  static const uint64_t machine = machine_hash();
  placement->machine = machine;
  for (int i = 0; i < placement->count; ++i) {
    const std::string id = gpu::cuda().bus_id(placement->devices[i]);
    id.copy(placement->bus_ids[i], Placement::kBusIdBytes - 1);
  }
}

namespace {

template <class Span>
void add_bounds(const std::vector<Span>& spans, std::set<size_t>* bounds) {
  for (const Span& span : spans) bounds->insert({span.begin, span.begin + span.count});
}

class Planner {
 public:
  Planner(const Request& request, const std::vector<int>& devices, size_t primary, const Neighbours& neighbours,
          const Scratch& scratch)
      : request_(request),
        op_(request.operation),
        width_(item_size(op_.dtype)),
        devices_(devices),
        primary_(primary),
        neighbours_(neighbours),
        scratch_(scratch),
        lanes_(devices.size()) {
    for (size_t i = 0; i < lanes_.size(); ++i) lanes_[i].local = i;
  }

  std::vector<PlannedLane> plan() {
    if (op_.count == 0) return std::move(lanes_);
    if (!request_.scattered) {
      plan_whole();
    } else if (op_.kind == Kind::allreduce) {
      plan_pieces();
    } else if (op_.kind == Kind::alltoall) {
      plan_exchange();
    } else {
      plan_shards();
    }
    return std::move(lanes_);
  }

 private:
  using Call = PlannedCall::Kind;

  int nccl_rank(int rank) const {
    return neighbours_.nccl_ranks.empty() ? 0 : neighbours_.nccl_ranks[static_cast<size_t>(rank)];
  }
  bool mine(int root) const { return root == neighbours_.rank; }
  char* spare(size_t lane, size_t count) { return scratch_(devices_[lane], count * width_); }

  // Whole arrays, each on one GPU.
  void plan_whole() {
    const DeviceMemory& memory = *request_.devices;
    const bool from_root = op_.kind == Kind::broadcast;
    const bool to_root = op_.kind == Kind::reduce;
    std::set<size_t> filled;  // outputs that the calls write
    for (size_t l = 0; l < devices_.size(); ++l) {
      const char* in = nullptr;
      std::vector<size_t> outs;
      for (size_t i = 0; i < request_.inputs.size() && in == nullptr; ++i) {
        if (memory.inputs[i] == devices_[l]) in = static_cast<const char*>(request_.inputs[i]);
      }
      for (size_t i = 0; i < request_.outputs.size(); ++i) {
        if (memory.outputs[i] == devices_[l]) outs.push_back(i);
      }
      const bool is_root = mine(op_.root) && l == primary_;
      char* to = nullptr;
      if (to_root && !is_root) {
        outs.clear();
      } else if (!outs.empty()) {
        to = static_cast<char*>(request_.outputs[outs[0]]);
      } else if (from_root && is_root) {
        to = const_cast<char*>(in);
      } else {
        to = spare(l, op_.count);
      }
      const Call call = from_root ? Call::broadcast : to_root ? Call::reduce : Call::allreduce;
      lanes_[l].calls.push_back({call, from_root && !is_root ? to : in, to, op_.count, nccl_rank(op_.root)});
      for (const size_t out : outs) {
        filled.insert(out);
        copy_whole(l, out, to);
      }
      if (l == primary_) result_ = to;
    }
    // Copies to outputs on GPUs that run no call, and to a reduction's other outputs.
    if (to_root && !mine(op_.root)) return;
    for (size_t out = 0; out < request_.outputs.size(); ++out) {
      if (filled.count(out) == 0) copy_whole(primary_, out, result_);
    }
  }

  void copy_whole(size_t lane, size_t out, const char* from) {
    if (request_.outputs[out] != from) lanes_[lane].after.push_back({request_.outputs[out], from, op_.bytes()});
  }

  // The functions below are for a single GPU.
  const char* from_sources(size_t begin, size_t count) {
    const Range range{begin, begin + count};
    if (const char* there = one_span(request_.sources, range, width_)) return there;
    char* packed = spare(0, count);
    for_overlaps(request_.sources, range, [&](const Source& source, const Range& both) {
      lanes_[0].before.push_back(
          {packed + (both.begin - begin) * width_, address_in(source, both.begin, width_), both.count() * width_});
    });
    return packed;
  }
  char* to_targets(size_t begin, size_t count) {
    if (char* there = one_span(request_.targets, Range{begin, begin + count}, width_)) return there;
    char* packed = spare(0, count);
    unpack(begin, count, packed);
    return packed;
  }
  void unpack(size_t begin, size_t count, const char* packed) {
    for_overlaps(request_.targets, Range{begin, begin + count}, [&](const Target& target, const Range& both) {
      char* const piece = address_in(target, both.begin, width_);
      const char* const from = packed + (both.begin - begin) * width_;
      if (piece != from) lanes_[0].after.push_back({piece, from, both.count() * width_});
    });
  }
  void add(Call call, const char* from, char* to, size_t count, int peer = 0) {
    lanes_[0].calls.push_back({call, from, to, count, peer});
  }

  void plan_pieces() {
    std::set<size_t> bounds;
    if (neighbours_.same_layout) {
      add_bounds(request_.sources, &bounds);
      add_bounds(request_.targets, &bounds);
    } else {
      bounds = {0, op_.count};
    }
    for (auto begin = bounds.begin(); begin != bounds.end() && std::next(begin) != bounds.end(); ++begin) {
      const size_t count = *std::next(begin) - *begin;
      const char* from = from_sources(*begin, count);
      add(Call::allreduce, from, to_targets(*begin, count), count);
    }
  }

  // Whether there is one shard of equal size for each rank, in the order of ranks.
  bool one_shard_each(const std::vector<Shard>& shards) const {
    if (shards.size() != neighbours_.nccl_ranks.size() || !neighbours_.one_each) return false;
    for (size_t r = 0; r < shards.size(); ++r) {
      if (shards[r].root != static_cast<int>(r) || shards[r].count != shards[0].count) return false;
    }
    return shards[0].count > 0;
  }

  void plan_shards() {
    const bool gathers = op_.kind == Kind::broadcast;
    const std::vector<Shard> all = request_.shards ? *request_.shards : std::vector<Shard>{{0, op_.count, op_.root}};
    if (one_shard_each(all) && (gathers ? neighbours_.whole_outputs : neighbours_.whole_inputs)) {
      const Shard& own = all[static_cast<size_t>(neighbours_.rank)];
      if (gathers) {
        const char* from = from_sources(own.begin, own.count);
        add(Call::allgather, from, to_targets(0, op_.count), own.count);
      } else {
        const char* from = from_sources(0, op_.count);
        add(Call::reducescatter, from, to_targets(own.begin, own.count), own.count);
      }
      return;
    }
    for (const Shard& shard : all) {
      if (shard.count == 0) continue;
      const bool is_root = mine(shard.root);
      if (!gathers) {
        const char* from = from_sources(shard.begin, shard.count);
        add(Call::reduce, from, is_root ? to_targets(shard.begin, shard.count) : nullptr, shard.count,
            nccl_rank(shard.root));
      } else if (!is_root) {
        char* to = to_targets(shard.begin, shard.count);
        add(Call::broadcast, to, to, shard.count, nccl_rank(shard.root));
      } else {
        const char* from = from_sources(shard.begin, shard.count);
        char* to = one_span(request_.targets, Range{shard.begin, shard.begin + shard.count}, width_);
        if (to == nullptr) {
          to = const_cast<char*>(from);
          unpack(shard.begin, shard.count, to);
        }
        add(Call::broadcast, from, to, shard.count, nccl_rank(shard.root));
      }
    }
  }

  // Sends in the order of the receivers, and receives in the order of the senders.
  void plan_exchange() {
    const std::vector<Shard>& all = *request_.shards;
    size_t size = 1;
    while (size * size < all.size()) ++size;
    const auto me = static_cast<size_t>(neighbours_.rank);
    for (size_t r = 0; r < size; ++r) {
      const Shard& out = all[me * size + r];
      const Shard& in = all[r * size + me];
      const int peer = nccl_rank(static_cast<int>(r));
      if (out.count > 0) add(Call::send, from_sources(out.begin, out.count), nullptr, out.count, peer);
      if (in.count > 0) add(Call::receive, nullptr, to_targets(in.begin, in.count), in.count, peer);
    }
  }

  const Request& request_;
  const Operation& op_;
  const size_t width_;
  const std::vector<int>& devices_;
  const size_t primary_;
  const Neighbours& neighbours_;
  const Scratch& scratch_;
  std::vector<PlannedLane> lanes_;
  char* result_ = nullptr;  // the result on the primary GPU
};

}  // namespace

std::vector<PlannedLane> plan(const Request& request, const std::vector<int>& devices, size_t primary,
                              const Neighbours& neighbours, const Scratch& scratch) {
  return Planner(request, devices, primary, neighbours, scratch).plan();
}

}  // namespace mykv
