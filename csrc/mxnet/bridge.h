// Requests as operations of MXNet's engine: it calls one when every array is ready, and what reads the outputs waits
// for it as for any operator.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "mxnet/api.h"
#include "runtime/runtime.h"

namespace mykv::mxnet {

// What one operation of the engine does.
struct Call {
  std::vector<Request> requests;  // complete but for the memory and the turn
  // One after the other, each only when the one before it has succeeded; otherwise all at the same time.
  bool chained = false;
  // Not empty: the name of the operation whose turn this one has, in place of the next turn under its own.
  std::string turn_of;
  std::vector<Handle> inputs;  // an array may be in both
  std::vector<Handle> outputs;
  // Puts the memory of inputs and outputs into the requests, when the engine runs the operation.
  std::function<void(std::vector<Request>&, const std::vector<void*>& inputs, const std::vector<void*>& outputs)> place;
};

// What has been put into the stream of a run context; nothing where it has none.
std::vector<std::shared_ptr<const gpu::Event>> events_of(const RunContext* context);

// Arrays that stay alive, each storage once: the engine hangs on an operation that names one storage twice.
class HeldArrays {
 public:
  HeldArrays(const Api& api, const std::vector<Handle>& arrays);
  HeldArrays(const HeldArrays&) = delete;
  HeldArrays& operator=(const HeldArrays&) = delete;
  ~HeldArrays();
  const std::vector<Handle>& arrays() const { return arrays_; }

 private:
  Api api_;
  std::vector<Handle> arrays_;
};

struct Pushed;
class PreparedOperation;  // what stays the same between the operations on one bucket

class Bridge {
 public:
  // `blocking`: the engine runs each operation inside the push (NaiveEngine). It loses the errors of operations, so
  // that push() itself must throw them.
  Bridge(Api api, bool blocking) : api_(api), blocking_(blocking) {}
  const Api& api() const { return api_; }

  // One operation of the engine. It takes the next turn under `name`.
  void push(const std::shared_ptr<Runtime>& runtime, const std::string& name, int priority, Call call) const;

  // A request in place, as often as it is pushed; `arrays` are those that lie in its memory.
  std::shared_ptr<const PreparedOperation> prepare(Request request, const std::vector<Handle>& arrays) const;
  // `label`: begins what must be the same on all ranks, in this push only. `turn_of`: the name whose last turn it
  // takes; empty: the next turn under its own name.
  void push(const std::shared_ptr<Runtime>& runtime, const std::shared_ptr<const PreparedOperation>& prepared,
            const std::string& label, const std::string& turn_of) const;
  // An operation that does nothing but write the arrays: whoever reads one of them waits for all that was pushed on
  // any.
  void push_fence(const HeldArrays& arrays) const;
  // An operation on an array that only fails.
  void push_failing(Handle array) const;

 private:
  void hand_to_engine(const std::shared_ptr<Pushed>& pushed, const std::string& name, int priority,
                      const std::vector<Handle>& written) const;

  Api api_;
  bool blocking_;
};

// How many operations of this process have failed.
uint64_t failed_operations();

// What went wrong with an operation that a blocking engine has run.
class FailedOperation : public Error {
 public:
  using Error::Error;
};

}  // namespace mykv::mxnet
