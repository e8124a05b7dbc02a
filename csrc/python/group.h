// The world of init() or a process set, as Python sees it. Each group has a runtime of its own.
#pragma once

#include <mpi.h>
#include <pybind11/numpy.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "mxnet/bridge.h"
#include "python/arguments.h"
#include "python/work.h"
#include "runtime/runtime.h"

namespace mykv {

// All groups of this process: the world of init() and the process sets.

class Group;

// The world of init(), or null. After leave() it stays, stopped, for engine operations that run later.
std::shared_ptr<Group>& world_group();
// The same; throws Error before init().
std::shared_ptr<Group> require_world();

// Makes all groups of this process leave.
void leave_all(const std::string& reason);
// A process has died: ends all operations of all groups of this process. The groups take no more operations.
void lose_all(const Failure& reason);

// Registers a runtime until it is destroyed.
void register_runtime(const std::shared_ptr<Runtime>& runtime);
// Every runtime that may still run.
std::vector<std::weak_ptr<Runtime>> runtimes();

// The bridge to the MXNet of this process.

// The bridge of attach_mxnet(); never destroyed, since the engine may hold on to it at exit.
void attach_bridge(std::unique_ptr<mxnet::Bridge> bridge);
// Throws Error before attach_bridge().
const mxnet::Bridge& bridge();

class Group {
 public:
  Group(MPI_Comm comm, const RuntimeOptions& options);
  // Calls leave(): an engine operation or a buffer may release the last reference to the runtime on the runtime's own
  // thread, which cannot join itself.
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  const World& world() const { return runtime_->world(); }
  bool forked() const { return runtime_->forked(); }
  const gpu::GpuRoads& gpus() const { return runtime_->gpus(); }
  std::tuple<bool, bool, std::string, bool> gpu_road() {
    return {gpus().any, gpus().nccl, gpus().reason, gpus().chosen};
  }
  bool runs(const Buffer& buffer) const { return buffer.runtime() == runtime_; }
  const std::shared_ptr<Runtime>& runtime() const { return runtime_; }
  // Messages and bytes that this rank has sent to other hosts, and received, for the agreement.
  std::vector<uint64_t> agreement_traffic();
  // The same for the values of operations.
  std::array<uint64_t, 4> exchange_traffic() { return runtime_->transport().traffic(); }

  // Arrays of numpy.
  std::unique_ptr<Work> submit_allreduce(const std::string& name, const std::vector<pybind11::array>& inputs,
                                         const std::vector<pybind11::array>& outputs, const std::string& op,
                                         double scale, int priority, const std::string& label, const std::string& wire,
                                         const std::string& turn_of);
  std::unique_ptr<Work> submit_broadcast(const std::string& name, const std::optional<pybind11::array>& input,
                                         const std::vector<pybind11::array>& outputs, int root, int priority,
                                         const std::string& label);

  // Memory on GPUs, including other libraries'. kind: 'allreduce', 'broadcast', 'reduce' or 'alltoall' (only by NCCL,
  // see Kind). `memory` has lists:
  //   inputs, outputs   (address, device) of whole arrays of this shape; or, instead of them,
  //   sources, targets  (begin, count, address, device) of pieces, in the order of their elements
  //   shards            (begin, count, root), see Request::shards
  //   streams           (stream, device): this operation waits for the work already in these streams
  // and the address of a context, as MXNet's engine gives it to operations; its stream is treated in the same way.
  std::unique_ptr<Work> submit_on_gpu(const std::string& name, const std::string& kind, const std::string& dtype,
                                      const std::vector<size_t>& shape, const pybind11::dict& memory,
                                      const std::string& op, double scale, int root, int priority,
                                      const std::string& label, const std::string& wire);

  // Memory in the host's segment.
  std::shared_ptr<Buffer> reserve(size_t bytes);
  std::shared_ptr<Buffer> allocate(size_t bytes);
  std::unique_ptr<Work> submit_bucket(const std::string& name, const std::shared_ptr<Buffer>& buffer, size_t begin,
                                      size_t count, const std::string& dtype, const std::string& layout,
                                      const std::string& op, double scale, int priority, const std::string& wire,
                                      const BucketShards& shards);

  // Arrays of MXNet. turn_of: the name whose last turn the operation takes; empty: the next turn under its own name.
  void push_allreduce(const std::string& name, const Handles& inputs, const Handles& outputs, const std::string& op,
                      double scale, int priority, const std::string& label, const std::string& wire,
                      const std::string& turn_of);
  void push_broadcast(const std::string& name, uintptr_t input, const Handles& outputs, int root, int priority,
                      const std::string& label, const std::string& turn_of, uint64_t key);
  void push_group(const std::string& name, const Handles& inputs, const Handles& outputs, const std::string& op,
                  double scale, int priority, const std::string& label, const std::string& wire,
                  const std::string& turn_of);
  void push_allgather(const std::string& name, uintptr_t input, uintptr_t output, const std::vector<size_t>& rows,
                      int priority, const std::string& label);
  void push_alltoall(const std::string& name, uintptr_t input, uintptr_t output,
                     const std::vector<std::vector<size_t>>& rows, int priority, const std::string& label);
  void refuse_alltoall(const std::string& name, uintptr_t input, const std::vector<std::vector<size_t>>& rows,
                       const Reason& reason);
  void push_reducescatter(const std::string& name, uintptr_t input, uintptr_t output, const std::string& op,
                          double scale, int priority, const std::string& label, const std::string& wire,
                          const std::string& turn_of);

  // division: (array, begin, count, owner) of all elements, in their order.
  using Division = std::vector<std::tuple<size_t, size_t, size_t, int>>;
  void push_reduce_to_owners(const std::string& name, const Handles& arrays, const Division& division,
                             const Handles& own, const Handles& next, const std::string& op, double scale, int priority,
                             const std::string& label, const std::string& wire);
  void push_gather_from_owners(const std::string& name, const Handles& arrays, const Division& division, int priority,
                               const std::string& label, const std::string& turn_of, const Handles& fenced);

  // turn_of: the name whose last turn is refused; empty: the next turn under `name`.
  void refuse(const std::string& name, const Reason& reason, const std::string& turn_of);

  // (name, seconds, ranks that have not arrived, ranks that do not respond or whose hosts do not), with the labels of
  // the ranks, the longest wait first. Empty `name`: all operations.
  using WaitingTuple = std::tuple<std::string, double, std::vector<int>, std::vector<int>>;
  std::vector<WaitingTuple> waiting(const std::string& name, double least_seconds);
  std::vector<std::vector<int>> waiting_for_this(const std::vector<std::string>& names, const std::string& turn_of);
  // `code`, `ranks`: the code and the ranks of the error that all ranks get. Operations in which this rank has waited
  // for less than `least_seconds` continue.
  void give_up(const std::string& name, const Reason& reason, const std::string& code, std::vector<int> ranks,
               double least_seconds);
  uint64_t last_turn(const std::string& name) { return runtime_->last_turn(name); }
  void forget(const std::string& prefix) { runtime_->forget(prefix); }
  // Tells the other ranks that this rank leaves, and stops.
  void leave(const Reason& reason);

 private:
  Operation broadcast_operation(int root, int priority) const;
  std::unique_ptr<Work> submit(const std::string& name, Operation operation, const std::vector<pybind11::array>& inputs,
                               const std::vector<pybind11::array>& outputs, const std::string& label,
                               const std::string& turn_of = "");
  std::unique_ptr<Work> post(Request request, std::vector<pybind11::array> kept, const std::string& turn_of = "");

  std::shared_ptr<Runtime> runtime_;
};

}  // namespace mykv
