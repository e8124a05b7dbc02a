// Requests as operations of MXNet's engine. The engine calls an operation when all its arrays are ready, and readers of
// its outputs wait for it as for any operator.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "mxnet/api.h"
#include "runtime/runtime.h"

namespace mykv::mxnet {

// The work of one operation of the engine.
struct Call {
  std::vector<Request> requests;  // complete except for the memory and the turn
  // True: the requests run one after another, each only if the previous request succeeded. False: all at once.
  bool chained = false;
  // Not empty: the operation takes the last turn under this name, instead of the next turn under its own name.
  std::string turn_of;
  // Not 0: if the operation fails, take_failed_updates() has this key.
  uint64_t key = 0;
  std::vector<Handle> inputs;  // an array may be an input and an output
  std::vector<Handle> outputs;
  // Puts the memory of inputs and outputs into the requests, when the engine runs the operation.
  std::function<void(std::vector<Request>&, const std::vector<void*>& inputs, const std::vector<void*>& outputs)>
      set_memory;
};

// Events for the work in the stream of a run context; empty if the context has no stream.
std::vector<std::shared_ptr<const gpu::Event>> events_of(const RunContext* context);

// Keeps arrays alive, each storage once: an operation that names a storage twice deadlocks the engine.
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
class PreparedOperation;  // the constant part of the operations on a bucket

// Whether the updates of a step have failed on this rank alone: the sums succeeded, on all ranks, but an update failed.
// The operations that note it run one after another, since each waits for the previous one.
struct UpdateWatch {
  UpdateWatch(uint64_t which, const std::string& names);
  const uint64_t key;  // the caller's number for the updates
  // Scope in the names of the step's operations: a failure in another trainer's step does not count.
  const std::string scope;
  uint64_t failures_before;  // failed operations when the step began, see take_failed_updates()
  std::atomic<bool> summed{false};
  std::atomic<bool> updated{false};
};

// The keys of updates that have failed on this rank alone since the last call, and of other failed operations with a
// key. Call it when a step begins: an update of several arrays fails on all ranks if any of their sums has failed, so
// updates of such a step are not noted.
std::vector<uint64_t> take_failed_updates();

class Bridge {
 public:
  // `blocking`: the engine runs each operation inside the push (NaiveEngine). Such an engine loses the errors of
  // operations, so push() throws them.
  Bridge(Api api, bool blocking) : api_(api), blocking_(blocking) {}
  const Api& api() const { return api_; }

  // Pushes one engine operation. It takes the next turn under `name`, or the turn of call.turn_of.
  void push(const std::shared_ptr<Runtime>& runtime, const std::string& name, int priority, Call call) const;

  // A request in place that can be pushed many times. `arrays`: the arrays that are in its memory.
  std::shared_ptr<const PreparedOperation> prepare(Request request, const std::vector<Handle>& arrays) const;
  // `label`: text that must be the same on all ranks, in this push only. `turn_of`: the name whose last turn the
  // operation takes; empty: the next turn under the operation's own name.
  void push(const std::shared_ptr<Runtime>& runtime, const std::shared_ptr<const PreparedOperation>& prepared,
            const std::string& label, const std::string& turn_of) const;
  // A no-op that writes the arrays: a reader of any array waits for all operations that were pushed on any of them.
  // `ends_step`: the fence follows updates of a step, whose time is measured. With a watch, the fence also notes
  // whether all these operations succeeded.
  void push_fence(const HeldArrays& arrays, bool ends_step, const std::shared_ptr<UpdateWatch>& watch = nullptr) const;
  // Pushes an operation that sets watch->summed after all operations pushed so far that write the arrays. The engine
  // skips it if an array carries an error.
  void push_look(const HeldArrays& arrays, const std::shared_ptr<UpdateWatch>& watch) const;
  // Evaluates a watch when all operations pushed so far that write the array have run or were skipped.
  void push_verdict(Handle array, const std::shared_ptr<UpdateWatch>& watch) const;
  // Work of this rank alone, on a worker of the engine for the CPU. `work` gets the memory of the arrays, and may write
  // it.
  void push_local(const std::string& name, int priority, const std::vector<Handle>& arrays,
                  std::function<void(const std::vector<void*>& memory)> work) const;
  // An operation on an array that always fails, with this reason.
  void push_failing(Handle array, const std::string& reason) const;

 private:
  void hand_to_engine(const std::shared_ptr<Pushed>& pushed, const std::string& name, int priority,
                      const std::vector<Handle>& written) const;

  Api api_;
  bool blocking_;
};

// The number of operations that this process has handed to MXNet's engine. They may end much later.
uint64_t pushed_operations();

// The number of failed operations of this process.
uint64_t failed_operations();

// The number of failed operations of this process in the steps of one trainer. `names`: the prefix of their names.
uint64_t failed_in_steps(const std::string& names);

// The failed operations by the code of their errors, with the text of the last error. MXNet keeps only a text.
struct FailureCount {
  uint64_t operations = 0;
  std::string last;
};
std::map<ErrorCode, FailureCount> failures();

// The error of an operation that a blocking engine has run.
class FailedOperation : public Error {
 public:
  using Error::Error;
};

}  // namespace mykv::mxnet
