// A collective operation: the fields of a request that must be the same on all ranks.
//
// How an operation is divided:
//
//   request  an operation and one rank's memory for it. Per rank.
//   part     at most RuntimeOptions::part_bytes of a request; in place: a whole shard or request; by NCCL: the whole
//            request. All ranks cut a request into the same parts. A part has a Key, and one entry in the table of each
//            host with a record per rank.
//   slice    between hosts: the n-th of k pieces of a part; k: ranks of the smallest host. Slice n belongs to local
//            rank n of each host.
//   chunk    on one host: 256 KiB of a part. Any rank of the host may reduce it, or only the part's owner if there is
//            one. Between hosts: about 1 MiB of a slice; the share of each host in a chunk is one message.
//   segment  the shared memory of a host, which holds its tables and slots. Per host; not a level of the division.
//
// The table counts the pieces of a part (Entry::pieces_to_finish, Transport::pieces()). With NCCL, and in a large
// broadcast on one host, there is one piece for each rank of the host. Between hosts each slice is a piece, and a part
// that travels in the agreement's messages is one piece. Otherwise each chunk is a piece.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "kernels/dtype.h"

namespace mykv {

// A hash of bytes that is the same in every process. Ranks of one job exchange such hashes.

uint64_t hash_bytes(const void* data, size_t bytes, uint64_t seed);

namespace compress {
class Compressor;
}

// Only NCCL has alltoall: shard i * size + j of the request goes from rank i to rank j.
enum class Kind : uint8_t { allreduce = 0, broadcast = 1, reduce = 2, alltoall = 3 };

// The location of an operation's shares, and how they are combined.
enum class DataPath : uint8_t {
  host = 0,  // in the memory of the processes, through slots in the host's segment
  staged,    // on GPUs, through slots in the host's segment
  nccl,      // on GPUs, by NCCL
};

struct Operation {
  Kind kind = Kind::allreduce;
  DType dtype = DType::float32;
  ReduceOp reduce_op = ReduceOp::sum;
  int32_t root = 0;  // broadcast: the rank whose bits all ranks get; reduce: the rank that gets the result
  bool has_concurrent_roots =
      false;              // broadcast: other ranks broadcast in the same call, so all links are equally busy
  double scale = 1.0;     // allreduce, reduce: applied once to the reduced value
  size_t count = 0;       // elements
  int32_t priority = 0;   // higher runs first
  bool in_place = false;  // all shares are in the segment already
  DataPath road = DataPath::host;
  // Floating-point allreduce and reduce: the type of values sent between hosts, if it differs from dtype.
  std::optional<DType> wire;
  // Alternative to `wire`: compresses the values between hosts, for arrays of at least `compress_from` bytes. The
  // pointer is valid only in the process that has set it, and only while the compressor lives.
  const compress::Compressor* compressor = nullptr;
  size_t compress_from = 0;

  // Sets the fields that depend on the arrays. Only float32 and float64 can be sent converted or compressed.
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

// A 128-bit hash of (name, turn, part), by which ranks match operations.
struct Key {
  uint64_t high = 0;
  uint64_t low = 0;
  bool operator==(const Key& other) const { return high == other.high && low == other.low; }
};

Key make_key(const std::string& name, uint64_t turn, uint64_t part);

}  // namespace mykv
