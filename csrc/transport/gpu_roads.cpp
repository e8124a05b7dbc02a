#include "transport/gpu_roads.h"

#include <algorithm>
#include <set>
#include <sstream>

#include "base/error.h"
#include "base/text.h"
#include "gpu/libraries.h"

namespace mykv::gpu {

namespace {

// A rank's message to the other ranks, one item per line.
struct Equipment {
  std::string road;
  int nccl = 0;                   // NCCL's version
  std::vector<std::string> gpus;  // bus ids
  std::string problem;            // why NCCL cannot be used here

  std::string text() const {
    std::string all = road + "\n" + std::to_string(nccl) + "\n" + std::string(beginning(problem, 300));
    for (const std::string& gpu : gpus) all += "\n" + gpu;
    return all;
  }
  static Equipment from(const std::string& text) {
    Equipment read;
    std::istringstream lines(text);
    std::string number, gpu;
    std::getline(lines, read.road);
    std::getline(lines, number);
    std::getline(lines, read.problem);
    while (std::getline(lines, gpu)) read.gpus.push_back(gpu);
    read.nccl = std::stoi(number);
    return read;
  }
};

Equipment look(const Settings& settings) {
  Equipment mine;
  mine.road = settings.road;
  const Libraries& libraries = Libraries::get();
  if (libraries.cuda() == nullptr) {
    mine.problem = libraries.cuda_problem();
    return mine;
  }
  const int count = libraries.cuda()->device_count();
  try {
    for (int device = 0; device < count; ++device) mine.gpus.push_back(libraries.cuda()->bus_id(device));
  } catch (const Error& error) {
    mine.gpus.clear();  // no throw: the other ranks wait for this rank's text
    mine.problem = error.what();
    return mine;
  }
  if (count == 0) mine.problem = "the CUDA runtime finds no GPU";
  if (libraries.nccl() != nullptr) {
    mine.nccl = libraries.nccl()->version();
  } else if (mine.problem.empty()) {
    mine.problem = libraries.nccl_problem();
  }
  return mine;
}

void require_same_road(const World& world, const std::vector<Equipment>& all) {
  for (size_t r = 1; r < all.size(); ++r) {
    if (all[r].road == all[0].road) continue;
    throw AgreedError("mykv needs the same settings on all ranks, but the road of GPU arrays (MYKV_GPU) is '" +
                      all[0].road + "' on rank " + std::to_string(world.label(0)) + " and '" + all[r].road +
                      "' on rank " + std::to_string(world.label(static_cast<int>(r))) +
                      ". Give the setting one value on all ranks");
  }
}

// Why these ranks cannot use NCCL; empty: they can.
std::string obstacle(const World& world, const std::vector<Equipment>& all) {
  for (size_t r = 0; r < all.size(); ++r) {
    const std::string rank = "rank " + std::to_string(world.label(static_cast<int>(r)));
    if (!all[r].problem.empty()) return rank + ": " + all[r].problem;
    if (all[r].nccl / 100 != all[0].nccl / 100) {
      return "rank " + std::to_string(world.label(0)) + " has NCCL " + nccl_version_text(all[0].nccl) + " and " + rank +
             " has NCCL " + nccl_version_text(all[r].nccl);
    }
  }
  for (const std::vector<int>& ranks : world.hosts()) {
    std::set<std::string> gpus;
    for (const int rank : ranks) {
      const std::vector<std::string>& some = all[static_cast<size_t>(rank)].gpus;
      gpus.insert(some.begin(), some.end());
    }
    if (gpus.size() < ranks.size()) {
      return "the host of rank " + std::to_string(world.label(ranks[0])) + " has " + std::to_string(ranks.size()) +
             " ranks but " + std::to_string(gpus.size()) + (gpus.size() == 1 ? " GPU" : " GPUs") +
             ", and NCCL needs a GPU for each rank";
    }
  }
  return {};
}

// Whether each GPU occurs only once: two replicas on one GPU would need a kernel that adds them.
bool distinct(std::vector<int> devices) {
  std::sort(devices.begin(), devices.end());
  return std::adjacent_find(devices.begin(), devices.end()) == devices.end();
}

}  // namespace

bool on_one_gpu(const DeviceMemory& devices) {
  std::set<int> all(devices.inputs.begin(), devices.inputs.end());
  all.insert(devices.outputs.begin(), devices.outputs.end());
  return all.size() <= 1;
}

GpuRoads find_gpu_roads(const World& world, const Settings& settings) {
  std::vector<Equipment> all;
  for (const std::string& text : world.texts(look(settings).text())) all.push_back(Equipment::from(text));
  require_same_road(world, all);
  GpuRoads result;
  result.any = std::any_of(all.begin(), all.end(), [](const Equipment& one) { return !one.gpus.empty(); });
  for (const Equipment& one : all) result.gpus.push_back(one.gpus);
  result.reason = obstacle(world, all);
  if (settings.road == "nccl" && !result.reason.empty()) {
    throw AgreedError("MYKV_GPU=nccl asks for NCCL, but " + result.reason);
  }
  result.chosen = settings.road == "host";
  if (result.chosen) result.reason = "MYKV_GPU=host";
  result.nccl = result.reason.empty();
  return result;
}

bool nccl_can(const Operation& operation) {
  // NCCL only moves their bytes.
  if (operation.kind == Kind::broadcast || operation.kind == Kind::alltoall) return true;
  switch (operation.dtype) {
    case DType::bool8:
    case DType::int16:
    case DType::uint16:
      return false;
    case DType::float32:
    case DType::float64:
    case DType::float16:
    case DType::bfloat16:
      return operation.scale == 1.0 || operation.reduce_op == ReduceOp::sum;
    default:
      return operation.scale == 1.0;
  }
}

DataPath GpuRoads::road_of(const Operation& operation, const DeviceMemory& devices, bool scattered) const {
  const bool lies_well =
      scattered ? on_one_gpu(devices) : operation.kind == Kind::broadcast || distinct(devices.inputs);
  return nccl && nccl_can(operation) && lies_well ? DataPath::nccl : DataPath::staged;
}

}  // namespace mykv::gpu
