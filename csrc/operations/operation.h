// What the ranks do together: the parts of a request that must be the same on all of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "kernels/dtype.h"

namespace mykv {

namespace compress {
class Compressor;
}

// alltoall goes by NCCL alone: shard i * size + j of the request goes from rank i to rank j.
enum class Kind : uint8_t { allreduce = 0, broadcast = 1, reduce = 2, alltoall = 3 };

// Where the shares of an operation lie, and how they meet.
enum class Road : uint8_t {
  host = 0,  // in the memory of the processes, through slots in the host's segment
  staged,    // on GPUs, through such slots
  nccl,      // on GPUs, by NCCL
  layered,   // on GPUs, by NCCL within each host, and through slots between hosts (layers.h)
};

struct Operation {
  Kind kind = Kind::allreduce;
  DType dtype = DType::float32;
  ReduceOp reduce_op = ReduceOp::sum;
  int32_t root = 0;       // broadcast: the rank whose bits everyone gets; reduce: the one that gets the result
  double scale = 1.0;     // allreduce, reduce: applied once to the reduced value
  size_t count = 0;       // elements
  int32_t priority = 0;   // higher runs first
  bool in_place = false;  // all shares lie in the segment already
  Road road = Road::host;
  // Floating-point allreduce and reduce: the type in which values travel between hosts, where it is not dtype.
  std::optional<DType> wire;
  // Instead: what shortens the values between hosts, for arrays of at least so many bytes. The pointer counts in the
  // process alone that has set it, and for as long as that lives.
  const compress::Compressor* compressor = nullptr;
  size_t compress_from = 0;

  // Sets what the arrays say; only float32 and float64 travel in another form.
  void set_arrays(DType type, size_t elements) {
    dtype = type;
    count = elements;
    if (type != DType::float32 && type != DType::float64) {
      wire.reset();
      compressor = nullptr;
    }
    if (bytes() < compress_from) compressor = nullptr;
  }
  size_t bytes() const { return count * item_size(dtype); }
};

// 128 bits that stand for (name, turn, part): what the ranks match operations by.
struct Key {
  uint64_t high = 0;
  uint64_t low = 0;
  bool operator==(const Key& other) const { return high == other.high && low == other.low; }
};

Key make_key(const std::string& name, uint64_t turn, uint64_t part);

}  // namespace mykv
