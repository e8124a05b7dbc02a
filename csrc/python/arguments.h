// Converts numbers and texts from Python to the core's types. Wrong values raise ValueError.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "mxnet/calls.h"
#include "operations/request.h"
#include "runtime/runtime.h"

namespace mykv {

using Handles = std::vector<uintptr_t>;  // NDArray.handle.value

// (begin, count, owner) shards that cover a bucket in order: each shard is reduced to its owner only. Empty: all ranks
// get the whole bucket.
using BucketShards = std::vector<std::tuple<size_t, size_t, int>>;

DType dtype_named(const std::string& name);
// `wire`: the dtype in which values travel between hosts, or a compressor ('topk k=0.01 ...'), or nothing.
Operation allreduce_operation(const Runtime& runtime, const std::string& op, double scale, int priority,
                              const std::string& wire);
mxnet::Handle handle(uintptr_t number);
std::vector<mxnet::Handle> handles(const Handles& numbers);
std::shared_ptr<const std::vector<Shard>> shards_of(const BucketShards& division, size_t elements, const World& world);

}  // namespace mykv
