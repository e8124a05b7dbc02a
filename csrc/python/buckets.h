// Buckets of gradients that are reduced in place, in every step by the same engine operation.
#pragma once

#include <memory>
#include <string>

#include "gpu/memory.h"
#include "python/arguments.h"
#include "python/group.h"
#include "runtime/runtime.h"

namespace mykv {

// An operation on a bucket that is in the segment or on a GPU, pushed once for each step.
class PreparedBucket {
 public:
  PreparedBucket(const std::string& name, const std::shared_ptr<Group>& group,
                 const std::shared_ptr<gpu::Memory>& memory, size_t begin, size_t count, const std::string& dtype,
                 const std::string& layout, const Handles& arrays, const std::string& op, double scale, int priority,
                 const std::string& wire, const BucketShards& shards);
  PreparedBucket(const std::string& name, std::shared_ptr<Buffer> buffer, size_t begin, size_t count,
                 const std::string& dtype, const std::string& layout, const Handles& arrays, const std::string& op,
                 double scale, int priority, const std::string& wire, const BucketShards& shards);
  void push(const std::string& label, const std::string& turn_of) const;

 private:
  std::shared_ptr<Runtime> runtime_;
  std::shared_ptr<const mxnet::PreparedOperation> prepared_;
};

// An operation that can be pushed many times: no array can be read before all operations that were pushed on any of the
// arrays have run. When an array raises an error, MXNet clears this error for all arrays that share it. Without a
// fence, a later operation would then run although an earlier operation failed.
class Fence {
 public:
  // `gradients`: read by the updates; `key`: the key of these updates in take_failed_updates(); `names`: prefix of the
  // names of the operations that sum the gradients.
  Fence(const Handles& arrays, const Handles& gradients, uint64_t key, std::string names);
  // Call it before the updates, to note if they fail on this rank alone.
  void begin();
  // `ends_step`: the fence follows updates of a step, whose time is measured. `broken`: some of these updates were not
  // pushed.
  void push(bool ends_step, bool broken);

 private:
  mxnet::HeldArrays arrays_, gradients_;
  uint64_t key_;
  std::string names_;
  std::shared_ptr<mxnet::UpdateWatch> watch_;  // from begin() to push()
};

}  // namespace mykv
