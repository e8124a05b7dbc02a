// How values travel between hosts: as they are, in another type, or compressed.
#pragma once

#include <cmath>
#include <cstddef>
#include <memory>

#include "kernels/kernels.h"
#include "operations/operation.h"
#include "transport/mpi/compression_state.h"

namespace mykv {

class WireFormat {
 public:
  // What compression has to know about values that are sent.
  struct EncodeArguments {
    size_t begin = 0;  // elements from the beginning of the slice
    size_t count = 0;
    uint32_t ticket = 0;     // counts the uses
    uint64_t stream = 0;     // identifies the message within one use; see Chunk::encode_arguments()
    bool is_result = false;  // the reduced and scaled result, not the sum of one host
  };

  // For a slice of `slice` elements. `compression`: null if values are not compressed.
  WireFormat(const Operation& operation, std::shared_ptr<CompressionState> compression, size_t slice, size_t hosts)
      : dtype_(operation.dtype),
        wire_(operation.wire.value_or(operation.dtype)),
        compression_(std::move(compression)),
        slice_(slice),
        result_travels_(operation.kind == Kind::allreduce),
        result_unit_(std::fabs(operation.scale) * static_cast<double>(hosts)) {}

  // Whether values travel as they lie in memory, without encoding.
  bool plain() const { return wire_ == dtype_ && compression_ == nullptr; }
  // Whether values that were encoded together can be decoded in pieces.
  bool divisible() const { return compression_ == nullptr; }
  CompressionState* compression() const { return compression_.get(); }
  // The bytes of `elements` elements on the wire.
  size_t bytes(size_t elements) const {
    return compression_ == nullptr ? elements * item_size(wire_) : compression_->compressor().bytes(piece(elements));
  }
  // The address of element `begin` in the output of encode(); only if divisible().
  const char* at(const char* encoded, size_t begin) const { return encoded + begin * item_size(wire_); }

  void encode(char* to, const char* from, const EncodeArguments& arguments) const {
    if (compression_ == nullptr) {
      convert(wire_, to, dtype_, from, arguments.count);
      return;
    }
    compress::Input input;
    input.values = from;
    input.residual = compression_->residual(arguments.begin, slice_);
    // Each host's sum may bring one unit, times the scale: a result of larger units loses none, and lags no more.
    input.unit = arguments.is_result ? result_unit_ : 1.0;
    input.again = result_travels_ && !arguments.is_result;
    input.draws.step = arguments.ticket;
    input.draws.stream = arguments.stream;
    compression_->compressor().encode(piece(arguments.count), input, to);
  }

  void decode(char* to, const char* from, size_t elements) const {
    if (compression_ == nullptr) {
      convert(dtype_, to, wire_, from, elements);
    } else {
      compression_->compressor().decode(piece(elements), from, to);
    }
  }

 private:
  compress::Piece piece(size_t elements) const { return {dtype_, elements, compression_->total()}; }

  DType dtype_;
  DType wire_;
  std::shared_ptr<CompressionState> compression_;
  size_t slice_;
  bool result_travels_;  // to all hosts; the result of a reduce stays on the host that computes it
  double result_unit_;
};

}  // namespace mykv
