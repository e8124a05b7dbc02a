// The global norm of gradients, and clipping by it, as operations of MXNet's engine. Both run on this rank alone.
// Between them, an operation on `squares` adds up the ranks' sums.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "mxnet/bridge.h"

namespace mykv::mxnet {

// Elements [begin, begin + count) of an array.
struct Piece {
  Handle array;
  size_t begin;
  size_t count;
};

// squares[0] = `begin` + the sum of the squares of all pieces; without `begin` the sum is added to squares[0].
// `squares`: float64, one element. The pieces are of float16, bfloat16, float32 or float64, in host memory. Throws
// Error, and pushes nothing, for other arrays.
void push_sum_of_squares(const Bridge& bridge, const std::vector<Piece>& pieces, Handle squares,
                         std::optional<double> begin, int priority);

// The factor by which gradients are clipped: 1 unless factor * sqrt(squares) is above `most`. `factor`: the optimizer's
// factor of gradients. As in gluon.utils.clip_global_norm, 1e-8 keeps the quotient finite.
double clipping_factor(double squares, double factor, double most);

// Multiplies the arrays by the clipping factor, in place; rounds once.
void push_clip(const Bridge& bridge, const std::vector<Handle>& arrays, Handle squares, double factor, double most,
               int priority);

}  // namespace mykv::mxnet
