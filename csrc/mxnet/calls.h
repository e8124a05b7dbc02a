// The collective operations on MXNet's arrays, as requests for the core. Each function pushes one engine operation,
// which takes this rank's next turn under `name`. It throws Error, and pushes nothing, if this rank's arrays are
// invalid.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "kernels/dtype.h"
#include "mxnet/api.h"
#include "mxnet/bridge.h"
#include "runtime/runtime.h"

namespace mykv::mxnet {

// Dtype, shape and device of an MXNet array.

struct Description {
  DType dtype;
  std::vector<size_t> shape;
  int gpu = -1;  // -1: in host memory

  size_t count() const;
  size_t row_elements() const;
  std::string text() const;
};

// Throws Error if the array is sparse, on another kind of device, or of an unknown dtype.
Description describe(const Api& api, Handle array);

// Arguments of all functions. `operation` is complete except for dtype and count, which come from the arrays; `label`
// is text that must be equal on all ranks. `turn_of` and `key`: as in Call.
struct Common {
  const Bridge& bridge;
  const std::shared_ptr<Runtime>& runtime;
  std::string name;
  Operation operation;
  std::string label;
  std::string turn_of = std::string();
  uint64_t key = 0;
};

// outputs[k] = scale * the sum (or other operator) over all ranks and all inputs.
void push_allreduce(const Common& common, const std::vector<Handle>& inputs, const std::vector<Handle>& outputs);

// outputs[k] = the root's bits; on other ranks only the shape and dtype of `input` matter.
void push_broadcast(const Common& common, Handle input, const std::vector<Handle>& outputs);

// outputs[i] = inputs[i] reduced over all ranks. There is one request for each dtype and device; they run one after the
// other.
void push_group(const Common& common, const std::vector<Handle>& inputs, const std::vector<Handle>& outputs);

// Elements [begin, begin + count) of one of several arrays, and the rank that owns them.
struct ArrayShard {
  size_t array;
  size_t begin;
  size_t count;
  int root;
};

// Each element of the arrays, reduced over all ranks, goes to its owner only: own[i] gets this rank's i-th shard.
// `division`: all elements of the arrays, in their order; the same on all ranks. `next`: arrays that later operations
// write on any rank; this operation does not touch them, but waits for them, and if it fails they carry the error.
void push_reduce_to_owners(const Common& common, const std::vector<Handle>& arrays,
                           const std::vector<ArrayShard>& division, const std::vector<Handle>& own,
                           const std::vector<Handle>& next);

// Copies each element of the arrays from its owner to all ranks. `fenced`: arrays that may not be read before the
// operation has run; it does not touch them, and if it fails they carry the error.
void push_gather_from_owners(const Common& common, const std::vector<Handle>& arrays,
                             const std::vector<ArrayShard>& division, const std::vector<Handle>& fenced);

// The functions below assume that the ranks have agreed on all arguments except the values of the arrays.

// rows[r]: first dimension of rank r's input. The output holds the inputs in the order of ranks.
void push_allgather(const Common& common, Handle input, Handle output, const std::vector<size_t>& rows);

// rows[s][r]: how many rows rank s sends to rank r; inputs hold them in the order of r, outputs in the order of s.
void push_alltoall(const Common& common, Handle input, Handle output, const std::vector<std::vector<size_t>>& rows);

// Called instead of push_alltoall(): refuses the operations that the other ranks push.
void refuse_alltoall(const Common& common, Handle input, const std::vector<std::vector<size_t>>& rows,
                     const std::string& reason);

// This rank's rows of the reduced input: of n rows each rank gets n / size, the first n % size ranks one more.
void push_reducescatter(const Common& common, Handle input, Handle output);

}  // namespace mykv::mxnet
