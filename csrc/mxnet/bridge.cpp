#include "mxnet/bridge.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <unordered_set>
#include <utility>

#include "base/error.h"
#include "base/forks.h"
#include "base/text.h"
#include "mxnet/step_clock.h"
#include "operations/signature.h"

namespace mykv::mxnet {

namespace {

// An error text with this prefix makes MXNet raise the class that kvstore_plugin/compat/errors.py registers. It is the
// only text that code depends on: an engine's error is a text, and MXNet parses it.
constexpr const char* kLostClass = "WorkersLost: ";
constexpr const char* kMykv = "mykv: ";
constexpr const char* kNotTaken = "MXNet's engine did not accept the operation";

// Whether this thread is pushing an operation. The engine calls an operation that is ready on the thread that pushes
// it.
thread_local bool t_pushes = false;

// The engine copies the error as a dmlc::Error, which has no members beyond those of std::runtime_error.
class EngineError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// An operation that names a storage twice deadlocks the engine, so each storage is named once. It is named as written
// even if it is only read, since its layout may have to change.
class Storages {
 public:
  explicit Storages(const Api& api) : api_(api) {}
  void add(Handle array) {
    if (seen_.insert(api_.storage(array)).second) arrays_.push_back(array);
  }
  const std::vector<Handle>& arrays() const { return arrays_; }

 private:
  const Api& api_;
  std::unordered_set<const void*> seen_;
  std::vector<Handle> arrays_;
};

}  // namespace

HeldArrays::HeldArrays(const Api& api, const std::vector<Handle>& arrays) : api_(api) {
  Storages storages(api);
  for (Handle array : arrays) storages.add(array);
  for (Handle array : storages.arrays()) arrays_.push_back(api.retain(array));
}

HeldArrays::~HeldArrays() {
  for (Handle array : arrays_) api_.release(array);
}

class PreparedOperation {
 public:
  PreparedOperation(const Api& api, Request given, const std::vector<Handle>& arrays)
      : request(std::move(given)), kept_(api, arrays) {}
  const std::vector<Handle>& arrays() const { return kept_.arrays(); }

  const Request request;

 private:
  HeldArrays kept_;  // the engine orders operations by them; their data is not used
};

namespace {

// Arrays of operations that have failed. The engine never frees an array that carries an error, since it skips the
// operation that would free it. So these arrays are released at the next push of an operation: by then the program has
// read the error of its last operation, which clears the error of all its arrays.
struct Unreleased {
  std::mutex mutex;
  std::vector<Handle> arrays;
  std::atomic<bool> any{false};
};
Unreleased& unreleased() { return usable_in_forks<Unreleased>(); }

void release_later(std::vector<Handle>& arrays) {
  const std::lock_guard<std::mutex> lock(unreleased().mutex);
  unreleased().arrays.insert(unreleased().arrays.end(), arrays.begin(), arrays.end());
  unreleased().any = true;
  arrays.clear();
}

void release_now(const Api& api) {
  if (!unreleased().any) return;
  std::vector<Handle> arrays;
  {
    const std::lock_guard<std::mutex> lock(unreleased().mutex);
    arrays.swap(unreleased().arrays);
    unreleased().any = false;
  }
  for (Handle array : arrays) api.release(array);
}

}  // namespace

// One pushed operation. The engine holds a pointer to a std::shared_ptr of it, and runs the deleter after its last use.
struct Pushed {
  Pushed(const Api& a, std::shared_ptr<Runtime> r) : api(a), runtime(std::move(r)) {}
  Pushed(const Pushed&) = delete;
  Pushed& operator=(const Pushed&) = delete;
  ~Pushed() { release(); }

  void release() {
    for (std::vector<Handle>* arrays : {&call.inputs, &call.outputs}) {
      if (has_failed) release_later(*arrays);
      for (Handle array : *arrays) api.release(array);
      arrays->clear();
    }
    in_place.reset();
  }

  Api api;
  std::shared_ptr<Runtime> runtime;
  Call call;                                          // its arrays are retained
  std::shared_ptr<const PreparedOperation> in_place;  // used instead of the call's arrays
  std::atomic<bool> taken{false};                     // its requests are posted, as work or as refusals
  std::atomic<bool> has_failed{false};
  std::shared_ptr<Failure> failure;  // with a blocking engine: receives the operation's error
};

namespace {

// The engine stores errors in a vector without a lock (ThreadedEngine::global_exception_refs_), so two operations that
// fail at the same time on two threads would corrupt the heap. Recursive, since ending an operation destroys objects
// that it kept alive.
struct Failing {
  std::recursive_mutex mutex;
};

// The operations that have failed in this process. MXNet keeps only the texts of their errors. They have their own
// mutex, since a thread that reads them has the GIL, and code under Failing::mutex may need the GIL.
struct Failures {
  std::mutex mutex;
  std::map<ErrorCode, FailureCount> by_code;
  std::string last_cause;  // the last error except refusals: a refusal often follows from an error before it
};
Failures& all_failures() { return usable_in_forks<Failures>(); }
std::atomic<uint64_t> g_pushed_operations{0};
std::atomic<uint64_t> g_failed_operations{0};
// Counts of failed operations. For an operation of a step, the scope in its name ("trainer0") says to which trainer's
// updates it belongs.
struct StepFailures {
  uint64_t in_steps_of(const std::string& scope) const {
    const auto own = by_scope.find(scope);
    return own == by_scope.end() ? 0 : own->second;
  }
  // Failed operations, except those in steps of other scopes.
  uint64_t concerning(const std::string& scope) const { return all - of_steps + in_steps_of(scope); }
  uint64_t all = 0;
  uint64_t of_steps = 0;
  std::map<std::string, uint64_t> by_scope;
};
struct FailuresOfSteps {
  std::mutex mutex;
  StepFailures now;
  StepFailures before;  // the counts at the last call of take_failed_updates()
};
FailuresOfSteps& failures_of_steps() { return usable_in_forks<FailuresOfSteps>(); }

std::string scope_of(const std::string& name) { return name.substr(0, name.find('/')); }

// `scope`: the scope of an operation of a step; empty: the operation does not belong to a step.
void count_failure(const Failure& error, const std::string& scope) {
  ++g_failed_operations;
  {
    FailuresOfSteps& steps = failures_of_steps();
    const std::lock_guard<std::mutex> lock(steps.mutex);
    ++steps.now.all;
    if (!scope.empty()) ++steps.now.of_steps, ++steps.now.by_scope[scope];
  }
  const std::lock_guard<std::mutex> lock(all_failures().mutex);
  FailureCount& failures = all_failures().by_code[error.code];
  ++failures.operations;
  failures.last = error.text;
}

void note_cause(const Failure& error) {
  if (error.code == ErrorCode::refused) return;
  const std::lock_guard<std::mutex> lock(all_failures().mutex);
  all_failures().last_cause = readable(error.text);
}

// The keys for take_failed_updates(). Kept until Python asks, even if its trainer is gone.
struct FailedUpdates {
  std::atomic<bool> any{false};
  std::mutex mutex;
  std::vector<uint64_t> keys;
};
FailedUpdates& failed_updates() { return usable_in_forks<FailedUpdates>(); }

void note_failed(uint64_t key) {
  const std::lock_guard<std::mutex> lock(failed_updates().mutex);
  failed_updates().keys.push_back(key);
  failed_updates().any = true;
}

// The reason for refusing an operation that the engine skips. The engine does not report the array's error, and the
// other ranks may not know it.
std::string inherited_error() {
  const std::lock_guard<std::mutex> lock(all_failures().mutex);
  const std::string& cause = all_failures().last_cause;
  return "its array carries the error of an earlier operation" +
         (cause.empty() ? "" : "; the last error of mykv on that rank: " + cause);
}

void fail(const EngineCallback& callback, Failure error, const std::string& scope) {
  error.text = readable(error.text);  // MXNet and pybind11 raise UnicodeDecodeError for text that is not UTF-8
  count_failure(error, scope);
  const EngineError engine_error((error.code == ErrorCode::dead ? kLostClass : "") + error.text);
  const std::lock_guard<std::recursive_mutex> lock(usable_in_forks<Failing>().mutex);
  callback.call(callback.engine, callback.parameter, &engine_error);
}

void complete(const EngineCallback& callback, const Failure* error, const std::string& scope = {}) {
  if (error == nullptr) {
    callback.call(callback.engine, callback.parameter, nullptr);
    return;
  }
  note_cause(*error);
  fail(callback, kMykv + *error, scope);
}

// Ends the engine's operation after the last of its requests, with the first error.
class CompletionCounter {
 public:
  CompletionCounter(size_t requests, std::function<void(const Failure*)> done)
      : left_(requests), done_(std::move(done)) {}

  void finish(const Failure* error) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (error != nullptr && error_.empty()) error_ = *error;
      if (--left_ > 0) return;
    }
    done_(error_.empty() ? nullptr : &error_);
  }

 private:
  std::mutex mutex_;
  size_t left_;
  Failure error_;
  std::function<void(const Failure*)> done_;
};

// Posts the rest of a chain of requests: each request when the previous one has succeeded on all ranks.
void post_chain(const std::shared_ptr<Runtime>& runtime, std::vector<Request> requests, size_t next,
                const std::function<void(const Failure*)>& done) {
  Request request = std::move(requests[next]);
  request.done = [runtime, requests = std::move(requests), next, done](const Failure* error) mutable {
    if (error != nullptr || next + 1 == requests.size()) {
      done(error);
    } else {
      post_chain(runtime, std::move(requests), next + 1, done);
    }
  };
  runtime->post(std::move(request));
}

void post_all(const std::shared_ptr<Runtime>& runtime, std::vector<Request> requests, bool chained,
              std::function<void(const Failure*)> done) {
  if (requests.empty()) {
    done(nullptr);
  } else if (requests.size() == 1) {
    requests[0].done = std::move(done);
    runtime->post(std::move(requests[0]));
  } else if (chained) {
    post_chain(runtime, std::move(requests), 0, done);
  } else {
    const auto together = std::make_shared<CompletionCounter>(requests.size(), std::move(done));
    for (Request& request : requests) {
      request.done = [together](const Failure* error) { together->finish(error); };
      runtime->post(std::move(request));
    }
  }
}

// Gives a request on GPUs the events that it must wait for: the work in the stream of the engine's run context. Without
// a stream all work has happened already (see hand_to_engine). request->devices was created before the request's memory
// was known: it has one device for all pieces of a request in pieces.
void set_gpu_memory(const RunContext* context, Request* request) {
  auto devices = std::make_shared<DeviceMemory>(*request->devices);
  if (request->scattered) {
    const int device = !devices->inputs.empty() ? devices->inputs[0] : devices->outputs[0];
    devices->device = device;
    devices->inputs.assign(request->sources.size(), device);
    devices->outputs.assign(request->targets.size(), device);
  }
  devices->after = events_of(context);
  request->devices = std::move(devices);
}

std::vector<Handle> arrays_of(const Call& call) {
  std::vector<Handle> arrays = call.inputs;
  arrays.insert(arrays.end(), call.outputs.begin(), call.outputs.end());
  return arrays;
}

void run(Pushed* pushed, const RunContext* context, const EngineCallback& on_complete) {
  if (pushed->taken.exchange(true)) {
    fail(on_complete, std::string(kMykv) + kNotTaken, {});
    return;
  }
  std::vector<Request> requests = std::move(pushed->call.requests);
  try {
    std::vector<void*> inputs, outputs;
    for (Handle array : pushed->call.inputs) inputs.push_back(pushed->api.data(array));
    for (Handle array : pushed->call.outputs) outputs.push_back(pushed->api.data(array));
    if (pushed->call.set_memory) pushed->call.set_memory(requests, inputs, outputs);
    for (Request& request : requests) {
      if (!request.devices) continue;
      set_gpu_memory(context, &request);
      // The engine releases the arrays when the operation is done, but a GPU that has failed may still write to them.
      if (!request.owner) request.owner = std::make_shared<HeldArrays>(pushed->api, arrays_of(pushed->call));
    }
  } catch (const std::exception& error) {
    for (Request& request : requests) request.refusal = error.what();
  }
  if (t_pushes && requests.size() == 1) requests.front().may_linger = true;
  const StepPhase step = requests.empty() ? StepPhase::none : requests.front().step;
  const bool is_sum = step == StepPhase::some || step == StepPhase::last;
  std::string scope = step == StepPhase::none ? std::string() : scope_of(requests.front().name);
  if (is_sum) note_sum_begins(step == StepPhase::last);
  // From here on *pushed may be deleted: done() can run at once, and then the engine deletes the operation.
  const std::shared_ptr<Runtime> runtime = pushed->runtime;
  post_all(
      runtime, std::move(requests), pushed->call.chained,
      [on_complete, step, is_sum, scope = std::move(scope), failure = pushed->failure, pushed](const Failure* error) {
        if (error != nullptr) {  // *pushed is valid until complete() is called
          pushed->has_failed = true;
          if (pushed->call.key != 0) note_failed(pushed->call.key);
        }
        if (is_sum) note_sum_ends();
        if (step == StepPhase::weights) note_updated();
        if (error != nullptr && failure) *failure = *error;
        complete(on_complete, error, scope);
      });
}

void run_pushed(void* context, void* on_complete, void* parameter) {
  run(static_cast<std::shared_ptr<Pushed>*>(parameter)->get(), static_cast<const RunContext*>(context),
      *static_cast<EngineCallback*>(on_complete));
}

void fail_as_asked(void*, void* on_complete, void* text) {
  fail(*static_cast<EngineCallback*>(on_complete), *static_cast<const std::string*>(text), {});
}

// Work of this rank alone. The engine holds a pointer to it, and runs the deleter after its last use.
struct LocalWork {
  LocalWork(const Api& a, const std::vector<Handle>& given) : api(a) {
    for (Handle array : given) arrays.push_back(api.retain(array));
  }
  LocalWork(const LocalWork&) = delete;
  LocalWork& operator=(const LocalWork&) = delete;
  ~LocalWork() {
    for (Handle array : arrays) api.release(array);
  }

  Api api;
  std::vector<Handle> arrays;
  std::function<void(const std::vector<void*>&)> work;
};

void run_local(void*, void* on_complete, void* parameter) {
  const auto* local = static_cast<const LocalWork*>(parameter);
  Failure failure;
  try {
    std::vector<void*> memory;
    for (Handle array : local->arrays) memory.push_back(local->api.data(array));
    local->work(memory);
  } catch (const std::exception& error) {
    failure = std::string(error.what());
  }
  complete(*static_cast<EngineCallback*>(on_complete), failure.empty() ? nullptr : &failure);
}

// The deleter of an operation whose parameter is a T.
template <class T>
void drop(void* parameter) {
  delete static_cast<T*>(parameter);
}

using SharedWatch = std::shared_ptr<UpdateWatch>;
UpdateWatch& watch_of(void* parameter) { return **static_cast<SharedWatch*>(parameter); }

void note_summed(void*, void* on_complete, void* parameter) {
  watch_of(parameter).summed = true;
  complete(*static_cast<EngineCallback*>(on_complete), nullptr);
}

uint64_t failures_concerning(const std::string& scope) {
  const std::lock_guard<std::mutex> lock(failures_of_steps().mutex);
  return failures_of_steps().now.concerning(scope);
}

void judge(void*, void* on_complete, void* parameter) {
  const UpdateWatch& watch = watch_of(parameter);
  if (watch.summed && !watch.updated && failures_concerning(watch.scope) == watch.failures_before) {
    note_failed(watch.key);
  }
  complete(*static_cast<EngineCallback*>(on_complete), nullptr);
}

struct FenceWork {
  bool ends_step;
  SharedWatch watch;
};

void run_fence(void*, void* on_complete, void* parameter) {
  const auto* fence = static_cast<const FenceWork*>(parameter);
  if (fence->watch) fence->watch->updated = true;
  if (fence->ends_step) note_updated();
  complete(*static_cast<EngineCallback*>(on_complete), nullptr);
}

// The form of an operation's function for MXNet 2.0, whose engine must also be told that the operation starts.
template <void (*function)(void*, void*, void*)>
void start_and_run(void* context, void* on_start, void* on_complete, void* parameter) {
  const auto* start = static_cast<EngineCallback*>(on_start);
  if (start->call != nullptr) start->call(start->engine, start->parameter, nullptr);
  function(context, on_complete, parameter);
}

template <void (*function)(void*, void*, void*)>
void* for_engine_of(const Api& api) {
  return api.major() == 1 ? reinterpret_cast<void*>(function) : reinterpret_cast<void*>(&start_and_run<function>);
}

// Posts refusals for an operation that the engine does not call, to tell the other ranks. False if the engine has
// called it.
bool refuse(Pushed& pushed, const std::string& reason) {
  if (pushed.taken.exchange(true)) return false;
  std::vector<Request> requests = std::move(pushed.call.requests);
  for (Request& request : requests) request.refusal = reason;
  const bool of_step = !requests.empty() && requests.front().step != StepPhase::none;
  count_failure(reason, of_step ? scope_of(requests.front().name) : std::string());
  if (pushed.call.key != 0) note_failed(pushed.call.key);
  post_all(pushed.runtime, std::move(requests), pushed.call.chained, [](const Failure*) {});
  return true;
}

void discard(void* parameter) {
  const std::unique_ptr<std::shared_ptr<Pushed>> pushed(static_cast<std::shared_ptr<Pushed>*>(parameter));
  if (!(*pushed)->taken && refuse(**pushed, inherited_error())) (*pushed)->has_failed = true;
}

}  // namespace

uint64_t pushed_operations() { return g_pushed_operations; }

uint64_t failed_operations() { return g_failed_operations; }

uint64_t failed_in_steps(const std::string& names) {
  const std::lock_guard<std::mutex> lock(failures_of_steps().mutex);
  return failures_of_steps().now.in_steps_of(scope_of(names));
}

UpdateWatch::UpdateWatch(uint64_t which, const std::string& names) : key(which), scope(scope_of(names)) {
  const std::lock_guard<std::mutex> lock(failures_of_steps().mutex);
  failures_before = failures_of_steps().before.concerning(scope);
}

std::vector<uint64_t> take_failed_updates() {
  {
    FailuresOfSteps& steps = failures_of_steps();
    const std::lock_guard<std::mutex> lock(steps.mutex);
    steps.before = steps.now;
  }
  FailedUpdates& updates = failed_updates();
  if (!updates.any) return {};
  const std::lock_guard<std::mutex> lock(updates.mutex);
  updates.any = false;
  return std::exchange(updates.keys, {});
}

std::map<ErrorCode, FailureCount> failures() {
  const std::lock_guard<std::mutex> lock(all_failures().mutex);
  return all_failures().by_code;
}

std::vector<std::shared_ptr<const gpu::Event>> events_of(const RunContext* context) {
  if (context == nullptr || context->stream == nullptr || context->context.device_type != kGpu) return {};
  return {gpu::Event::record(context->context.device_id, *static_cast<const gpu::CudaStream*>(context->stream))};
}

std::shared_ptr<const PreparedOperation> Bridge::prepare(Request request, const std::vector<Handle>& arrays) const {
  return std::make_shared<PreparedOperation>(api_, std::move(request), arrays);
}

void Bridge::push(const std::shared_ptr<Runtime>& runtime, const std::shared_ptr<const PreparedOperation>& prepared,
                  const std::string& label, const std::string& turn_of) const {
  const auto pushed = std::make_shared<Pushed>(api_, runtime);
  pushed->call.turn_of = turn_of;
  pushed->call.requests.push_back(prepared->request);
  std::string& signature = pushed->call.requests.back().signature;
  signature = labelled(label, signature);
  pushed->in_place = prepared;
  hand_to_engine(pushed, prepared->request.name, prepared->request.operation.priority, prepared->arrays());
}

void Bridge::push(const std::shared_ptr<Runtime>& runtime, const std::string& name, int priority, Call call) const {
  const auto pushed = std::make_shared<Pushed>(api_, runtime);
  Storages storages(api_);
  for (std::vector<Handle>* arrays : {&call.outputs, &call.inputs}) {
    for (Handle& array : *arrays) storages.add(array);
  }
  // Retained only after all steps that can fail: after a failure, arrays that were not retained must not be released.
  for (std::vector<Handle>* arrays : {&call.outputs, &call.inputs}) {
    for (Handle& array : *arrays) array = api_.retain(array);
  }
  pushed->call = std::move(call);
  hand_to_engine(pushed, name, priority, storages.arrays());
}

void Bridge::push_fence(const HeldArrays& arrays, bool ends_step, const std::shared_ptr<UpdateWatch>& watch) const {
  api_.push(for_engine_of<run_fence>(api_), new FenceWork{ends_step, watch}, &drop<FenceWork>, {}, arrays.arrays(),
            kAsync, 0, "mykv fence");
}

void Bridge::push_look(const HeldArrays& arrays, const std::shared_ptr<UpdateWatch>& watch) const {
  api_.push(for_engine_of<note_summed>(api_), new SharedWatch(watch), &drop<SharedWatch>, arrays.arrays(), {}, kAsync,
            0, "mykv look");
}

void Bridge::push_verdict(Handle array, const std::shared_ptr<UpdateWatch>& watch) const {
  api_.push(for_engine_of<judge>(api_), new SharedWatch(watch), &drop<SharedWatch>, {}, {array}, kAsync, 0,
            "mykv verdict", true);
}

void Bridge::push_local(const std::string& name, int priority, const std::vector<Handle>& arrays,
                        std::function<void(const std::vector<void*>&)> work) const {
  Storages storages(api_);
  for (Handle array : arrays) storages.add(array);
  auto local = std::make_unique<LocalWork>(api_, arrays);
  local->work = std::move(work);
  const std::string shown = "mykv " + name;
  // The pointer is given up before the push, since it is unknown whether the engine runs the deleter after a failed
  // push.
  api_.push(for_engine_of<run_local>(api_), local.release(), &drop<LocalWork>, {}, storages.arrays(), kCpuPrioritized,
            priority, shown.c_str());
}

void Bridge::push_failing(Handle array, const std::string& reason) const {
  api_.push(for_engine_of<fail_as_asked>(api_), new std::string(kMykv + reason), &drop<std::string>, {}, {array},
            kAsync, 0, "mykv error");
}

void Bridge::hand_to_engine(const std::shared_ptr<Pushed>& pushed, const std::string& name, int priority,
                            const std::vector<Handle>& written) const {
  release_now(api_);
  const auto failure = blocking_ ? std::make_shared<Failure>() : nullptr;
  pushed->failure = failure;
  const std::string& turn_of = pushed->call.turn_of;
  const uint64_t turn = turn_of.empty() ? pushed->runtime->take_turn(name) : pushed->runtime->last_turn(turn_of);
  for (Request& request : pushed->call.requests) {
    request.turn = turn;
    request.ticket = pushed->runtime->take_ticket();
    request.step = take_step_phase();
  }
  ++g_pushed_operations;
  const std::string shown = "mykv " + name;
  // The engine gets a CPU operation even for arrays on GPUs. MXNet 2.0's engine continues before kernels have run
  // ("Async") and waits for the kernels only before CPU operations that do not run in the pushing thread. And a GPU
  // operation would end with a wait for a whole stream, in the core's thread.
  const std::vector<Request>& requests = pushed->call.requests;
  const bool on_gpu =
      std::any_of(requests.begin(), requests.end(), [](const Request& r) { return r.devices != nullptr; });
  const int property = on_gpu ? kCpuPrioritized : kAsync;
  const struct Pushing {
    Pushing() { t_pushes = true; }
    ~Pushing() { t_pushes = false; }
  } pushing;
  try {
    api_.push(for_engine_of<run_pushed>(api_), new std::shared_ptr<Pushed>(pushed), &discard, {}, written, property,
              priority, shown.c_str());
  } catch (const Error& error) {
    // The turn is taken, so the other ranks wait for this rank. Whether the engine has run the deleter, or will, is
    // unknown: so the engine's pointer stays valid, and only the object behind it is emptied.
    if (refuse(*pushed, kNotTaken)) pushed->release();
    throw FailedOperation(kMykv + (std::string(kNotTaken) + ": " + error.failure()));
  }
  if (failure && !failure->empty()) throw FailedOperation(kMykv + *failure);
}

}  // namespace mykv::mxnet
