#include "mxnet/gradient_norm.h"

#include <cmath>

#include "base/error.h"
#include "kernels/kernels.h"
#include "mxnet/calls.h"

namespace mykv::mxnet {

namespace {

// Throws Error unless the array is in host memory and its norm is defined.
Description describe_gradient(const Api& api, Handle array) {
  const Description described = describe(api, array);
  if (described.gpu >= 0) throw Error("the array is on a GPU");
  if (!has_squares(described.dtype)) throw Error("the norm of " + described.text() + " is not defined");
  return described;
}

void require_squares(const Api& api, Handle array) {
  const Description described = describe_gradient(api, array);
  if (described.dtype != DType::float64 || described.count() != 1) {
    throw Error("the sum of squares needs an array of one float64, not " + described.text());
  }
}

}  // namespace

void push_sum_of_squares(const Bridge& bridge, const std::vector<Piece>& pieces, Handle squares,
                         std::optional<double> begin, int priority) {
  struct Read {
    DType dtype;
    size_t offset;  // in bytes
    size_t count;
  };
  require_squares(bridge.api(), squares);
  std::vector<Handle> arrays{squares};
  std::vector<Read> reads;
  for (const Piece& piece : pieces) {
    const Description described = describe_gradient(bridge.api(), piece.array);
    if (piece.begin > described.count() || piece.count > described.count() - piece.begin) {
      throw Error("a piece is not in its array, which is " + described.text());
    }
    arrays.push_back(piece.array);
    reads.push_back({described.dtype, piece.begin * item_size(described.dtype), piece.count});
  }
  bridge.push_local("sum of squares", priority, arrays, [reads, begin](const std::vector<void*>& memory) {
    auto* squares = static_cast<double*>(memory[0]);
    double total = begin.value_or(*squares);
    for (size_t i = 0; i < reads.size(); ++i) {
      const char* data = static_cast<const char*>(memory[i + 1]) + reads[i].offset;
      total += sum_of_squares(reads[i].dtype, data, reads[i].count);
    }
    *squares = total;
  });
}

double clipping_factor(double squares, double factor, double most) {
  const double norm = std::fabs(factor) * std::sqrt(squares);
  return norm <= most ? 1.0 : most / (norm + 1e-8);
}

void push_clip(const Bridge& bridge, const std::vector<Handle>& arrays, Handle squares, double factor, double most,
               int priority) {
  struct Written {
    DType dtype;
    size_t count;
  };
  require_squares(bridge.api(), squares);
  std::vector<Handle> all{squares};
  std::vector<Written> written;
  for (Handle array : arrays) {
    const Description described = describe_gradient(bridge.api(), array);
    all.push_back(array);
    written.push_back({described.dtype, described.count()});
  }
  bridge.push_local("clip", priority, all, [written, factor, most](const std::vector<void*>& memory) {
    const double clipping = clipping_factor(*static_cast<const double*>(memory[0]), factor, most);
    if (clipping == 1) return;
    for (size_t i = 0; i < written.size(); ++i) {
      void* data = memory[i + 1];
      reduce(written[i].dtype, ReduceOp::sum, &data, 1, &data, 1, written[i].count, clipping);
    }
  });
}

}  // namespace mykv::mxnet
