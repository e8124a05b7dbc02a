// The collective operations on MXNet's arrays, as requests for the core. Each function pushes one operation of the
// engine, which takes this rank's next turn under `name`, and throws Error when this rank can see that its arrays do
// not fit; nothing was pushed then.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "mxnet/bridge.h"
#include "runtime/runtime.h"

namespace mykv::mxnet {

// What all of them need. `operation` is complete but for dtype and count, which come from the arrays; `label` is text
// that must be equal on all ranks.
struct Common {
  const Bridge& bridge;
  const std::shared_ptr<Runtime>& runtime;
  std::string name;
  Operation operation;
  std::string label;
};

// outputs[k] = scale * the sum (or what the operator is) over all ranks and all inputs.
void push_allreduce(const Common& common, const std::vector<Handle>& inputs, const std::vector<Handle>& outputs);

// The root's bits; on other ranks `input` counts with its shape and dtype only.
void push_broadcast(const Common& common, Handle input, const std::vector<Handle>& outputs);

// outputs[i] = inputs[i] reduced over all ranks; one transfer for each dtype, one after the other.
void push_group(const Common& common, const std::vector<Handle>& inputs, const std::vector<Handle>& outputs);

// The three that follow suppose that the ranks have agreed on all arguments but the values.

// rows[r]: first dimension of rank r's input. The output holds the inputs one after the other.
void push_allgather(const Common& common, Handle input, Handle output, const std::vector<size_t>& rows);

// rows[s][r]: how many rows rank s sends to rank r; inputs hold them in the order of r, outputs in the order of s.
void push_alltoall(const Common& common, Handle input, Handle output, const std::vector<std::vector<size_t>>& rows);

// This rank's rows of the reduced input: of n rows each rank gets n / size, the first n % size ranks one more.
void push_reducescatter(const Common& common, Handle input, Handle output);

}  // namespace mykv::mxnet
