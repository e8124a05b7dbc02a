// From MXNet's arrays to requests, and back to its engine when they are done. One engine operation per request: the
// engine calls it when every array is ready, and what reads the outputs waits for it as for any operator.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "mxnet/api.h"
#include "runtime/error.h"
#include "runtime/runtime.h"

namespace mykv::mxnet {

struct Pushed;
class InPlace;  // what stays the same between the operations on one bucket

class Bridge {
 public:
  // `blocking`: the engine runs each operation inside the push (NaiveEngine). It loses the errors of operations, so
  // that push() itself must throw them.
  Bridge(Api api, bool blocking) : api_(api), blocking_(blocking) {}

  // inputs, outputs: NDArray handles of the caller's; an array may be in both. The operation's dtype and count are
  // filled in from the arrays. Throws Error when this rank can see that the arrays do not fit; nothing was posted then.
  void push(const std::shared_ptr<Runtime>& runtime, std::string name, Operation operation,
            const std::vector<Handle>& inputs, const std::vector<Handle>& outputs) const;

  // A request in place, as often as it is pushed; `arrays` are those that lie in its memory.
  std::shared_ptr<const InPlace> prepare(Request request, const std::vector<Handle>& arrays) const;
  void push(const std::shared_ptr<Runtime>& runtime, const std::shared_ptr<const InPlace>& prepared) const;

 private:
  void hand_to_engine(std::unique_ptr<Pushed> pushed, const std::vector<Handle>& written) const;

  Api api_;
  bool blocking_;
};

// What went wrong with an operation that a blocking engine has run.
class FailedOperation : public Error {
 public:
  using Error::Error;
};

// The text by which ranks compare an operation: kind, operator or root, scale, dtype, shape.
std::string signature_of(const Operation& operation, const std::string& shape);

}  // namespace mykv::mxnet
