// The state of compression between hosts from one operation under a name to the next: residual and number of uses. A
// rank has a state for each part of each name, for the slice that the rank owns.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "compress/compressor.h"
#include "operations/operation.h"

namespace mykv {

class CompressionState {
 public:
  CompressionState(const compress::Compressor& compressor, DType dtype, size_t count, size_t total, uint64_t name)
      : compressor_(compressor), dtype_(dtype), count_(count), total_(total), name_(name) {}

  const compress::Compressor& compressor() const { return compressor_; }
  // Elements of the whole request.
  size_t total() const { return total_; }
  // A hash of name and part.
  uint64_t name() const { return name_; }
  bool is_of(const Operation& operation, size_t total) const {
    return &compressor_ == operation.compressor && dtype_ == operation.dtype && count_ == operation.count &&
           total_ == total;
  }

  // The members below are only for the thread that drives the transport.

  // The address of an element's residual, in a slice of `slice` elements; null without error feedback. Zeros at first.
  char* residual(size_t element, size_t slice);

  // Two operations may have the same chunk under way at once. take_use() numbers the uses, in the same order on all
  // hosts. Encode the results of a use only when is_next() is true for it.
  uint32_t take_use(uint32_t chunk) { return counters(chunk).taken++; }
  bool is_next(uint32_t chunk, uint32_t use) { return counters(chunk).ended == use; }
  void end_use(uint32_t chunk) { ++counters(chunk).ended; }

 private:
  struct Counters {
    uint32_t taken = 0;
    uint32_t ended = 0;
  };
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  Counters& counters(uint32_t chunk) {
    if (counters_.size() <= chunk) counters_.resize(chunk + 1);
    return counters_[chunk];
  }

  const compress::Compressor& compressor_;
  const DType dtype_;
  const size_t count_;
  const size_t total_;
  const uint64_t name_;
  std::unique_ptr<char, Free> residual_;
  std::vector<Counters> counters_;
};

// All compression states of one runtime. Thread-safe.
class CompressionStates {
 public:
  // The state for a part of an operation of `total` elements. A new state, if the last operation under this name had
  // another compressor, dtype or number of elements.
  std::shared_ptr<CompressionState> of(const std::string& name, size_t part, const Operation& operation, size_t total);
  // Drops the states of all names that begin with `prefix`.
  void forget(const std::string& prefix);

 private:
  std::mutex mutex_;
  std::map<std::string, std::vector<std::shared_ptr<CompressionState>>> states_;  // by name, then by part
};

}  // namespace mykv
