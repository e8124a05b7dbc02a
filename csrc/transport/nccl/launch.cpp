#include "transport/nccl/launch.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "base/error.h"
#include "base/forks.h"
#include "gpu/libraries.h"
#include "kernels/kernels.h"

namespace mykv {

namespace {

struct Current {
  std::mutex mutex;
  std::weak_ptr<Launcher> launcher;
};

Current& the_current() { return usable_in_forks<Current>(); }

}  // namespace

std::shared_ptr<Launcher> Launcher::begin(LaunchOrder& order, std::vector<int> ranks) {
  const std::shared_ptr<Launcher> made(new Launcher(order, std::move(ranks)));
  std::lock_guard<std::mutex> lock(the_current().mutex);
  the_current().launcher = made;
  return made;
}

std::shared_ptr<Launcher> Launcher::current() {
  std::lock_guard<std::mutex> lock(the_current().mutex);
  return the_current().launcher.lock();
}

// When this runs, the groups have finished all operations in the streams, or given them up.
Launcher::~Launcher() {
  if (kept_ || process_ != getpid()) {
    for (auto& [number, one] : devices_) (void)one.stream.release();
    return;
  }
  for (auto& [number, one] : devices_) {
    try {
      const gpu::DeviceScope scope(number);
      for (void* block : one.blocks) gpu::cuda().free(block);
    } catch (const Error&) {
      // The GPU has failed, and its memory is gone.
    }
  }
}

std::vector<int> Launcher::local_ranks(const std::vector<int>& ranks) const {
  std::vector<int> found;
  for (const int rank : ranks) {
    const auto at = std::find(ranks_.begin(), ranks_.end(), rank);
    if (at == ranks_.end()) return {};
    found.push_back(static_cast<int>(at - ranks_.begin()));
  }
  return found;
}

bool Launcher::is_next_launch(uint64_t number, Bell& bell) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (number == next_) return true;
  waiting_[number] = &bell;
  return false;
}

void Launcher::release(uint64_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  waiting_.erase(number);
  if (number < next_) return;
  released_.insert(number);
  while (!released_.empty() && *released_.begin() == next_) {
    released_.erase(released_.begin());
    ++next_;
  }
  const auto next = waiting_.find(next_);
  if (next != waiting_.end()) next->second->ring();
}

Launcher::Device& Launcher::device(int number) {
  Device& one = devices_[number];
  if (!one.stream) one.stream = std::make_unique<gpu::Stream>(number);
  return one;
}

gpu::Stream& Launcher::stream(int number) {
  std::lock_guard<std::mutex> lock(mutex_);
  return *device(number).stream;
}

void Launcher::reserve(int number, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  Device& one = device(number);
  if (bytes <= one.bytes) return;
  size_t taken = std::max(bytes, 2 * one.bytes);
  const gpu::Cuda& api = gpu::cuda();
  const gpu::DeviceScope scope(number);
  void* block = nullptr;
  int code = api.malloc(&block, taken);
  if (code != gpu::Cuda::kSuccess && taken > bytes) {
    api.get_last_error();
    taken = bytes;
    code = api.malloc(&block, taken);
  }
  if (code != gpu::Cuda::kSuccess) api.get_last_error();
  api.check(code, "cudaMalloc");
  one.blocks.push_back(block);
  one.bytes = taken;
}

char* Launcher::scratch(int number, size_t bytes) {
  reserve(number, bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<char*>(device(number).blocks.back());
}

namespace {

constexpr size_t kAlign = 512;  // the alignment of cudaMalloc

// Gives out pieces of each GPU's scratch memory one after the other. Before take_memory(), the addresses only count
// bytes.
class ScratchPool {
 public:
  char* operator()(int device, size_t bytes) {
    size_t& used = used_[device];
    char* const base = bases_.count(device) > 0 ? bases_[device] : reinterpret_cast<char*>(kAlign);
    char* const piece = base + used;
    used += (bytes + kAlign - 1) / kAlign * kAlign;
    return piece;
  }
  bool any() const { return !used_.empty(); }
  const std::map<int, size_t>& used() const { return used_; }
  void take_memory(Launcher& launcher) {
    for (auto& [device, bytes] : used_) {
      bases_[device] = launcher.scratch(device, bytes);
      bytes = 0;
    }
  }

 private:
  std::map<int, size_t> used_;
  std::map<int, char*> bases_;
};

int nccl_type(DType type) {
  switch (type) {
    case DType::float32:
      return gpu::Nccl::kFloat32;
    case DType::float64:
      return gpu::Nccl::kFloat64;
    case DType::float16:
      return gpu::Nccl::kFloat16;
    case DType::bfloat16:
      return gpu::Nccl::kBfloat16;
    case DType::int8:
      return gpu::Nccl::kInt8;
    case DType::uint8:
      return gpu::Nccl::kUint8;
    case DType::int32:
      return gpu::Nccl::kInt32;
    case DType::uint32:
      return gpu::Nccl::kUint32;
    case DType::int64:
      return gpu::Nccl::kInt64;
    case DType::uint64:
      return gpu::Nccl::kUint64;
    default:
      throw Error(std::string("NCCL has no ") + dtype_name(type));
  }
}

int nccl_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::min:
      return gpu::Nccl::kMin;
    case ReduceOp::max:
      return gpu::Nccl::kMax;
    case ReduceOp::product:
      return gpu::Nccl::kProduct;
    default:
      return gpu::Nccl::kSum;
  }
}

// The scale in the type of the elements; only floating-point elements have a scale, see nccl_can().
void set_scalar(DType type, double scale, char* scalar) {
  const auto narrow = static_cast<float>(scale);
  if (type == DType::float64) {
    std::memcpy(scalar, &scale, sizeof scale);
  } else if (type == DType::float32) {
    std::memcpy(scalar, &narrow, sizeof narrow);
  } else {
    convert(type, scalar, DType::float32, &narrow, 1);
  }
}

bool reduces(const Operation& op) { return op.kind == Kind::allreduce || op.kind == Kind::reduce; }

}  // namespace

void reserve_scratch(const Request& request, const Placement& placement, int rank, Launcher& launcher) {
  ScratchPool pool;
  Neighbours unknown;
  unknown.rank = rank;
  plan(request, placement.list(), static_cast<size_t>(placement.primary), unknown, std::ref(pool));
  for (const auto& [device, bytes] : pool.used()) launcher.reserve(device, bytes);
}

Launch::Launch(const Request& request, const Placement& placement, const Arrangement& arrangement, int rank,
               Launcher& launcher)
    : request_(request), communicator_(arrangement.communicator), launcher_(launcher) {
  Neighbours neighbours;
  neighbours.rank = rank;
  neighbours.nccl_ranks = arrangement.nccl_ranks;
  neighbours.same_layout = arrangement.same_layout;
  neighbours.one_each = static_cast<size_t>(communicator_->size()) == arrangement.nccl_ranks.size();
  neighbours.whole_inputs = arrangement.whole_inputs;
  neighbours.whole_outputs = arrangement.whole_outputs;
  const std::vector<int> devices = placement.list();
  const auto primary = static_cast<size_t>(placement.primary);
  ScratchPool pool;
  lanes_ = plan(request, devices, primary, neighbours, std::ref(pool));
  if (pool.any()) {
    pool.take_memory(launcher);
    lanes_ = plan(request, devices, primary, neighbours, std::ref(pool));
  }
  for (const PlannedLane& lane : lanes_) {
    gpu::Stream& stream = launcher.stream(devices[lane.local]);
    for (const auto& event : request.devices->after) stream.wait(*event);
    copy(stream.get(), lane.before);
  }
  if (reduces(request.operation)) make_operators();
  NcclCallGroup group;
  for (size_t l = 0; l < lanes_.size(); ++l) {
    for (const PlannedCall& one : lanes_[l].calls) {
      for (const PlannedCall& part : in_whole_blocks(one)) call(part, l);
    }
  }
  group.end();
}

void Launch::copy(gpu::CudaStream stream, const std::vector<PlannedCopy>& copies) const {
  const gpu::Cuda& api = gpu::cuda();
  for (const PlannedCopy& one : copies)
    api.check(api.memcpy_async(one.to, one.from, one.bytes, gpu::Cuda::kMemcpyDefault, stream), "cudaMemcpyAsync");
}

// NCCL has an operator for the mean over all NCCL ranks; any other scale needs an operator for each communicator.
void Launch::make_operators() {
  const Operation& op = request_.operation;
  if (op.scale == 1.0) {
    operators_.assign(lanes_.size(), nccl_op(op.reduce_op));
    return;
  }
  if (op.scale == 1.0 / communicator_->size()) {
    operators_.assign(lanes_.size(), gpu::Nccl::kAverage);
    return;
  }
  own_operators_ = true;
  alignas(8) char scalar[8];
  set_scalar(op.dtype, op.scale, scalar);
  for (const NcclCommunicator::Local& local : communicator_->locals()) {
    int made = 0;
    const int code =
        nccl().make_premultiplied_sum(&made, scalar, nccl_type(op.dtype), gpu::Nccl::kScalarHostImmediate, local.comm);
    nccl().check(code, "ncclRedOpCreatePreMulSum", local.comm);
    operators_.push_back(made);
  }
}

// On a single rank, NCCL multiplies by a kernel with one block of threads for each 16 KiB, but at most 32 blocks.
// Before NCCL 2.29.7 the kernel could leave out the last elements if the blocks differed in size (NVIDIA/nccl issue
// 1950). With a multiple of 16 KiB all blocks have one size, and less than 16 KiB is a single block.
std::vector<PlannedCall> Launch::in_whole_blocks(const PlannedCall& all) const {
  constexpr size_t kBlockBytes = 16 << 10;
  const size_t item = item_size(request_.operation.dtype);
  const size_t rest = all.count % (kBlockBytes / item);
  const size_t whole = all.count - rest;
  if (!own_operators_ || communicator_->size() > 1 || rest == 0 || whole == 0) return {all};
  PlannedCall first = all, last = all;
  first.count = whole;
  last.count = rest;
  last.from += whole * item;
  last.to += whole * item;
  return {first, last};
}

void Launch::call(const PlannedCall& c, size_t lane) const {
  const Operation& op = request_.operation;
  const NcclCommunicator::Local& local = communicator_->locals()[lanes_[lane].local];
  const gpu::CudaStream stream = launcher_.stream(local.device).get();
  const size_t bytes = c.count * item_size(op.dtype);
  constexpr int kBytes = gpu::Nccl::kUint8;  // for values that are not reduced
  switch (c.kind) {
    case PlannedCall::Kind::allreduce:
      nccl().check(nccl().all_reduce(c.from, c.to, c.count, nccl_type(op.dtype), operators_[lane], local.comm, stream),
                   "ncclAllReduce", local.comm);
      return;
    case PlannedCall::Kind::reduce:
      nccl().check(
          nccl().reduce(c.from, c.to, c.count, nccl_type(op.dtype), operators_[lane], c.peer, local.comm, stream),
          "ncclReduce", local.comm);
      return;
    case PlannedCall::Kind::broadcast:
      nccl().check(nccl().broadcast(c.from, c.to, bytes, kBytes, c.peer, local.comm, stream), "ncclBroadcast",
                   local.comm);
      return;
    case PlannedCall::Kind::allgather:
      nccl().check(nccl().all_gather(c.from, c.to, bytes, kBytes, local.comm, stream), "ncclAllGather", local.comm);
      return;
    case PlannedCall::Kind::reducescatter:
      nccl().check(
          nccl().reduce_scatter(c.from, c.to, c.count, nccl_type(op.dtype), operators_[lane], local.comm, stream),
          "ncclReduceScatter", local.comm);
      return;
    case PlannedCall::Kind::send:
      nccl().check(nccl().send(c.from, bytes, kBytes, c.peer, local.comm, stream), "ncclSend", local.comm);
      return;
    case PlannedCall::Kind::receive:
      nccl().check(nccl().receive(c.to, bytes, kBytes, c.peer, local.comm, stream), "ncclRecv", local.comm);
      return;
  }
}

bool Launch::finish_calls() {
  if (calls_finished_) return true;
  if (!communicator_->calls_finished("an operation")) return false;
  for (const PlannedLane& lane : lanes_) {
    gpu::Stream& stream = launcher_.stream(communicator_->locals()[lane.local].device);
    copy(stream.get(), lane.after);
    ends_.push_back(stream.record());
  }
  if (own_operators_) {
    for (size_t l = 0; l < lanes_.size(); ++l) {
      const gpu::NcclComm comm = communicator_->locals()[l].comm;
      nccl().check(nccl().drop_op(operators_[l], comm), "ncclRedOpDestroy", comm);
    }
  }
  calls_finished_ = true;
  return true;
}

bool Launch::happened() const {
  for (const auto& end : ends_) {
    if (!end->happened()) return false;
  }
  return true;
}

}  // namespace mykv
