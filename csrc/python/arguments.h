// Converts numbers and texts from Python to the core's types. Wrong values raise ValueError.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "mxnet/calls.h"
#include "operations/request.h"
#include "runtime/runtime.h"

namespace mykv {

// The errors of the core as exceptions of Python, with their codes and ranks as attributes.

void bind_errors(pybind11::module_& m);
// The class raised for operations that fail inside a push: MXNetError. None: RuntimeError.
void set_failure_type(const pybind11::object& type);
// Throws ValueError if there is no such code.
ErrorCode error_code_of(const std::string& name);

// A Python string for a message.

// Any str: surrogates, such as from a file name in another encoding, become escapes. pybind11 would reject them in a
// std::string, and a rank could not tell the other ranks why it refuses.
struct Reason {
  std::string text;
};

}  // namespace mykv

template <>
struct pybind11::detail::type_caster<mykv::Reason> {
  PYBIND11_TYPE_CASTER(mykv::Reason, const_name("str"));

  bool load(handle given, bool) {
    if (!PyUnicode_Check(given.ptr())) return false;
    const auto bytes =
        reinterpret_steal<pybind11::bytes>(PyUnicode_AsEncodedString(given.ptr(), "utf-8", "backslashreplace"));
    if (!bytes) throw error_already_set();
    value.text = static_cast<std::string>(bytes);
    return true;
  }
};

namespace mykv {

using Handles = std::vector<uintptr_t>;  // NDArray.handle.value

// (begin, count, owner) shards that cover a bucket in order: each shard is reduced to its owner only. Empty: all ranks
// get the whole bucket.
using BucketShards = std::vector<std::tuple<size_t, size_t, int>>;

DType dtype_named(const std::string& name);
// `wire`: the dtype of values sent between hosts, or a compressor ('topk k=0.01 ...'), or nothing.
Operation allreduce_operation(const Runtime& runtime, const std::string& op, double scale, int priority,
                              const std::string& wire);
mxnet::Handle handle(uintptr_t number);
std::vector<mxnet::Handle> handles(const Handles& numbers);
std::shared_ptr<const std::vector<Shard>> shards_of(const BucketShards& division, size_t elements, const World& world);

// The options of init().

// Throws ValueError if an option has an unknown name.
RuntimeOptions options_from(const pybind11::dict& given);

}  // namespace mykv
