// Collective operations: ranks show each other a piece, and each takes what it needs of it.
#include <algorithm>
#include <cstring>

#include "nccl.h"

namespace standin {
namespace {

std::string describe(const Description& one) {
  return std::string(name(one.kind)) + " of " + std::to_string(one.count) + " elements of dtype " +
         std::to_string(one.type) + ", op " + std::to_string(one.op) + ", root " + std::to_string(one.root);
}

bool same(const Description& a, const Description& b) {
  return a.kind == b.kind && a.type == b.type && a.op == b.op && a.root == b.root && a.count == b.count;
}

// How many elements NCCL's kernel for one rank multiplies: before 2.29.7 its blocks did not always reach the last ones.
size_t multiplied_alone(size_t count, size_t unit) {
  if (version() >= 22907) return count;
  size_t blocks = std::min<size_t>(32, (count * unit + (16 << 10) - 1) / (16 << 10)), pack = 16 / unit;
  return std::min(count, blocks * ((count / blocks + pack - 1) / pack * pack));
}

// One collective on one rank.
class Collective {
 public:
  Collective(Comm& comm, const Operation& operation)
      : comm_(comm),
        meeting_(*comm.meeting),
        operation_(operation),
        unit_(size_of(operation.type)),
        send_(static_cast<char*>(cuda().alias(operation.send))),
        receive_(static_cast<char*>(cuda().alias(operation.receive))) {}

  void run() {
    if (!agreed()) return;
    size_t parts = operation_.kind == kReduceScatter ? static_cast<size_t>(comm_.size) : 1;
    size_t most = kStageBytes / unit_ / parts;
    for (size_t begin = 0; begin < operation_.count; begin += most) {
      size_t count = std::min(most, operation_.count - begin);
      show(begin, count);
      if (!barrier()) return;
      take(begin, count);
      if (!barrier()) return;
    }
  }

 private:
  bool barrier() {
    return meeting_.barrier([&](const std::function<bool()>& condition) { return comm_.wait(condition); });
  }

  bool agreed() {
    const Reduction& reduction = operation_.reduction;
    double scalar = reduction.scalar;
    if (reduction.on_device) scalar = read_scalar(cuda().alias(reduction.on_device), reduction.scalar_type);
    int turn = turn_++ % 2;
    meeting_.seat(comm_.rank).operations[turn] = {operation_.kind, operation_.type,  reduction.op,
                                                  operation_.root, operation_.count, scalar};
    if (!barrier()) return false;
    const Description& mine = meeting_.seat(comm_.rank).operations[turn];
    for (int rank = 0; rank < comm_.size; ++rank) {
      const Description& theirs = meeting_.seat(rank).operations[turn];
      scalars_.push_back(theirs.scalar);
      if (same(mine, theirs)) continue;
      violation(comm_, describe(mine) + " meets rank " + std::to_string(rank) + "'s " + describe(theirs));
      return false;
    }
    return true;
  }

  void show(size_t begin, size_t count) {
    char* stage = meeting_.stage(comm_.rank);
    if (operation_.kind == kBroadcast && comm_.rank != operation_.root) return;
    if (operation_.kind != kReduceScatter) {
      std::memcpy(stage, send_ + begin * unit_, count * unit_);
      return;
    }
    for (int part = 0; part < comm_.size; ++part)
      std::memcpy(stage + part * count * unit_, send_ + (part * operation_.count + begin) * unit_, count * unit_);
  }

  void take(size_t begin, size_t count) {
    char* to = receive_ + begin * unit_;
    std::vector<const void*> stages;
    size_t part = operation_.kind == kReduceScatter ? comm_.rank * count * unit_ : 0;
    for (int rank = 0; rank < comm_.size; ++rank) stages.push_back(meeting_.stage(rank) + part);
    switch (operation_.kind) {
      case kBroadcast:
        std::memcpy(to, stages[operation_.root], count * unit_);
        break;
      case kAllGather:
        for (int rank = 0; rank < comm_.size; ++rank)
          std::memcpy(to + rank * operation_.count * unit_, stages[rank], count * unit_);
        break;
      default:
        if (comm_.size == 1 && operation_.reduction.op == kPreMulSum) {
          size_t end = multiplied_alone(operation_.count, unit_);
          count = end > begin ? std::min(count, end - begin) : 0;
        }
        if (operation_.kind != kReduce || comm_.rank == operation_.root)
          reduce(operation_.type, operation_.reduction.op, stages, scalars_, to, count);
    }
  }

  Comm& comm_;
  Meeting& meeting_;
  const Operation& operation_;
  size_t unit_;
  char* send_;
  char* receive_;
  std::vector<double> scalars_;
  uint64_t& turn_ = comm_.collectives;
};

}  // namespace

void run_collective(Comm& comm, const Operation& operation) { Collective(comm, operation).run(); }

}  // namespace standin
