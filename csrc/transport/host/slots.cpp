#include "transport/host/slots.h"

#include <algorithm>

#include "kernels/kernels.h"

namespace mykv {

void Slots::gather_pointers(Entry& entry, size_t begin, std::vector<void*>& pointers) const {
  const size_t offset = begin * item_size(entry.operation.dtype);
  pointers.clear();
  for (int r = 0; r < table_.local_size(); ++r) pointers.push_back(slot(entry, r) + offset);
}

void Slots::combine(Entry& entry, size_t begin, size_t end, int root) const {
  if (entry.operation.kind == Kind::broadcast) {
    spread(entry, begin, end, root);
    return;
  }
  static thread_local std::vector<void*> pointers;
  gather_pointers(entry, begin, pointers);
  const Operation& op = entry.operation;
  const bool to_one = op.kind == Kind::reduce;
  reduce(op.dtype, op.reduce_op, pointers.data(), table_.local_size(), pointers.data() + (to_one ? root : 0),
         to_one ? 1 : table_.local_size(), end - begin, op.scale);
}

void Slots::combine_owned(Entry& entry, size_t begin, size_t end, const LocalShare& share) const {
  static thread_local std::vector<void*> inputs;
  static thread_local std::vector<void*> outputs;
  gather_pointers(entry, begin, inputs);
  gather_pointers(entry, begin, outputs);
  const Operation& op = entry.operation;
  const auto me = static_cast<size_t>(entry.owner);
  const size_t offset = begin * item_size(op.dtype);
  // The kernels take the same pointer type for inputs and for outputs in place.
  inputs[me] = const_cast<char*>(share.input) + offset;
  outputs[me] = share.output + offset;
  const bool to_one = op.kind == Kind::reduce;
  reduce(op.dtype, op.reduce_op, inputs.data(), table_.local_size(), outputs.data() + (to_one ? me : 0),
         to_one ? 1 : table_.local_size(), end - begin, op.scale);
}

void Slots::reduce_into(Entry& entry, size_t begin, size_t end, int into) const {
  static thread_local std::vector<void*> pointers;
  gather_pointers(entry, begin, pointers);
  const Operation& op = entry.operation;
  void* output = pointers[static_cast<size_t>(into)];
  reduce(op.dtype, op.reduce_op, pointers.data(), table_.local_size(), &output, 1, end - begin, 1.0);
}

void Slots::sum_into(Entry& entry, size_t begin, size_t end, char* to) const {
  static thread_local std::vector<void*> pointers;
  static thread_local std::vector<float> wide;
  gather_pointers(entry, begin, pointers);
  const Operation& op = entry.operation;
  const DType type = partial_type(op.dtype, op.reduce_op);
  const size_t count = end - begin;
  void* output = to;
  if (type == op.dtype) {
    reduce(type, op.reduce_op, pointers.data(), table_.local_size(), &output, 1, count, 1.0);
    return;
  }
  // Works in pieces that stay in the cache. The first share is converted into the memory of the sum.
  const size_t most = std::max<size_t>(piece_bytes(table_.local_size()) / sizeof(float), 1);
  wide.resize(std::min(most, count) * (pointers.size() - 1));
  std::vector<void*> converted(pointers.size());
  for (size_t at = 0; at < count; at += most) {
    const size_t some = std::min(most, count - at);
    converted[0] = to + at * sizeof(float);
    for (size_t r = 1; r < pointers.size(); ++r) converted[r] = wide.data() + (r - 1) * some;
    for (size_t r = 0; r < pointers.size(); ++r) {
      convert(type, converted[r], op.dtype, static_cast<const char*>(pointers[r]) + at * item_size(op.dtype), some);
    }
    reduce(type, op.reduce_op, converted.data(), table_.local_size(), converted.data(), 1, some, 1.0);
  }
}

void Slots::fill(Entry& entry, const char* from) const {
  for (int r = 0; r < table_.local_size(); ++r) copy(slot(entry, r), from, entry.operation.bytes());
}

void Slots::spread(Entry& entry, size_t begin, size_t end, int source) const {
  const size_t width = item_size(entry.operation.dtype);
  const char* from = slot(entry, source) + begin * width;
  for (int r = 0; r < table_.local_size(); ++r) {
    if (r != source) copy(slot(entry, r) + begin * width, from, (end - begin) * width);
  }
}

}  // namespace mykv
