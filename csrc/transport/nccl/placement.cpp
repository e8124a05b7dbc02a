#include "transport/nccl/placement.h"

#include <algorithm>
#include <fstream>
#include <set>
#include <string>

#include "base/error.h"
#include "gpu/libraries.h"
#include "operations/operation.h"

namespace mykv {

namespace {

// A hash of the boot id, not of the host name: containers have names of their own, and may share them.
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
  // The result of a reduce is best computed on the GPU of the output.
  if (!request.scattered && op.kind == Kind::reduce && !memory.outputs.empty() && devices.count(memory.outputs[0]) > 0)
    primary = memory.outputs[0];
  devices.insert(primary);
  if (devices.size() > Placement::kMostDevices) {
    throw Error("its arrays are on " + std::to_string(devices.size()) + " GPUs, and a rank can use " +
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

}  // namespace mykv
