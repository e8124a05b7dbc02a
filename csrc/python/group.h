// Ranks that work together, as Python sees them: the world of init(), or a process set. Each has a runtime of its own.
#pragma once

#include <mpi.h>
#include <pybind11/numpy.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "mxnet/calls.h"
#include "python/work.h"
#include "runtime/buffer.h"
#include "runtime/runtime.h"

namespace mykv {

using Handles = std::vector<uintptr_t>;  // NDArray.handle.value

class Group {
 public:
  Group(MPI_Comm comm, const RuntimeOptions& options);
  // Leaves: whatever still holds the runtime afterwards (an engine operation, a buffer) may be the last to let it go on
  // the runtime's own thread, which cannot wait for itself.
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  const World& world() const { return runtime_->world(); }
  bool forked() const { return runtime_->forked(); }
  bool runs(const Buffer& buffer) const { return buffer.runtime() == runtime_; }

  // Arrays of numpy.
  std::unique_ptr<Work> submit_allreduce(const std::string& name, const std::vector<pybind11::array>& inputs,
                                         const std::vector<pybind11::array>& outputs, const std::string& op,
                                         double scale, int priority, const std::string& label, const std::string& wire);
  std::unique_ptr<Work> submit_broadcast(const std::string& name, const std::optional<pybind11::array>& input,
                                         const std::vector<pybind11::array>& outputs, int root, int priority,
                                         const std::string& label);

  // Memory in the host's segment.
  std::shared_ptr<Buffer> reserve(size_t bytes);
  std::shared_ptr<Buffer> allocate(size_t bytes);
  std::unique_ptr<Work> submit_bucket(const std::string& name, const std::shared_ptr<Buffer>& buffer, size_t begin,
                                      size_t count, const std::string& dtype, const std::string& layout,
                                      const std::string& op, double scale, int priority, const std::string& wire);

  // Arrays of MXNet.
  void push_allreduce(const std::string& name, const Handles& inputs, const Handles& outputs, const std::string& op,
                      double scale, int priority, const std::string& label, const std::string& wire);
  void push_broadcast(const std::string& name, uintptr_t input, const Handles& outputs, int root, int priority,
                      const std::string& label);
  void push_group(const std::string& name, const Handles& inputs, const Handles& outputs, const std::string& op,
                  double scale, int priority, const std::string& label, const std::string& wire);
  void push_allgather(const std::string& name, uintptr_t input, uintptr_t output, const std::vector<size_t>& rows,
                      int priority, const std::string& label);
  void push_alltoall(const std::string& name, uintptr_t input, uintptr_t output,
                     const std::vector<std::vector<size_t>>& rows, int priority, const std::string& label);
  void push_reducescatter(const std::string& name, uintptr_t input, uintptr_t output, const std::string& op,
                          double scale, int priority, const std::string& label, const std::string& wire);

  void refuse(const std::string& name, const std::string& reason);
  void forget(const std::string& prefix) { runtime_->forget(prefix); }
  // Tells the other ranks that this one goes, and stops.
  void abandon(const std::string& reason);

 private:
  Operation broadcast_operation(int root, int priority) const;
  std::unique_ptr<Work> submit(const std::string& name, Operation operation, const std::vector<pybind11::array>& inputs,
                               const std::vector<pybind11::array>& outputs, const std::string& label);
  std::unique_ptr<Work> post(Request request, std::vector<pybind11::array> kept);

  std::shared_ptr<Runtime> runtime_;
};

// An operation on a bucket that lies in the segment, pushed once for each step.
class PreparedBucket {
 public:
  PreparedBucket(const std::string& name, std::shared_ptr<Buffer> buffer, size_t begin, size_t count,
                 const std::string& dtype, const std::string& layout, const Handles& arrays, const std::string& op,
                 double scale, int priority, const std::string& wire);
  void push() const;

 private:
  std::shared_ptr<Buffer> buffer_;
  std::shared_ptr<const mxnet::InPlace> prepared_;
};

// The bridge of attach_mxnet(); never destroyed, since the engine may hold on to it at exit.
void attach_bridge(std::unique_ptr<mxnet::Bridge> bridge);

// The world of init(), or null. It stays, stopped, after abandon(), for engine operations that still come.
std::shared_ptr<Group>& world_group();
// The same; throws Error before init().
std::shared_ptr<Group> require_world();

// Makes all groups of this process leave.
void leave_all(const std::string& reason);

}  // namespace mykv
