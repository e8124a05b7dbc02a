#include "mxnet/bridge.h"

#include <cstdio>
#include <unordered_set>

#include "runtime/error.h"

namespace mykv::mxnet {

namespace {

// The engine copies the error it is given as a dmlc::Error, which is a std::runtime_error and nothing more.
class EngineError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The engine hangs on an operation that names one storage twice: each is named once, and as written even where it is
// only read, since its layout may have to change.
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

class InPlace {
 public:
  InPlace(const Api& api, Request given, const std::vector<Handle>& arrays) : request(std::move(given)), api_(api) {
    Storages storages(api);
    for (Handle array : arrays) storages.add(array);
    for (Handle array : storages.arrays()) kept_.push_back(api.retain(array));
  }
  InPlace(const InPlace&) = delete;
  InPlace& operator=(const InPlace&) = delete;
  ~InPlace() {
    for (Handle array : kept_) api_.release(array);
  }
  const std::vector<Handle>& arrays() const { return kept_; }

  const Request request;

 private:
  Api api_;
  std::vector<Handle> kept_;  // only ordered by the engine, not looked into
};

// One pushed operation. It lives until the engine's last use of it, which runs the deleter.
struct Pushed {
  Pushed(const Api& a, std::shared_ptr<Runtime> r) : api(a), runtime(std::move(r)) {}
  Pushed(const Pushed&) = delete;
  Pushed& operator=(const Pushed&) = delete;
  ~Pushed() {
    for (Handle array : inputs) api.release(array);
    for (Handle array : outputs) api.release(array);
  }

  Api api;
  std::shared_ptr<Runtime> runtime;
  Request request;
  std::vector<Handle> inputs;
  std::vector<Handle> outputs;
  std::shared_ptr<const InPlace> in_place;  // instead of inputs and outputs
  bool called = false;
  std::shared_ptr<std::string> failure;  // of a blocking engine's operation: where its error goes
};

namespace {

void complete(const EngineCallback& callback, const std::string* error) {
  if (error == nullptr) {
    callback.call(callback.engine, callback.parameter, nullptr);
    return;
  }
  const EngineError engine_error("mykv: " + *error);
  callback.call(callback.engine, callback.parameter, &engine_error);
}

void run(Pushed* pushed, const EngineCallback& on_complete) {
  pushed->called = true;
  Request request = std::move(pushed->request);
  request.done = [on_complete, failure = pushed->failure](const std::string* error) {
    if (error != nullptr && failure) *failure = *error;
    complete(on_complete, error);
  };
  try {
    for (Handle array : pushed->inputs) request.inputs.push_back(pushed->api.data(array));
    for (Handle array : pushed->outputs) request.outputs.push_back(pushed->api.data(array));
  } catch (const std::exception& error) {
    request.refusal = error.what();
  }
  // From here on *pushed may be gone: done() can run at once, and the engine deletes the operation with it.
  const std::shared_ptr<Runtime> runtime = pushed->runtime;
  runtime->post(std::move(request));
}

void run_1(void*, void* on_complete, void* parameter) {
  run(static_cast<Pushed*>(parameter), *static_cast<EngineCallback*>(on_complete));
}

void run_2(void*, void* on_start, void* on_complete, void* parameter) {
  const auto* start = static_cast<EngineCallback*>(on_start);
  if (start->call != nullptr) start->call(start->engine, start->parameter, nullptr);
  run(static_cast<Pushed*>(parameter), *static_cast<EngineCallback*>(on_complete));
}

void discard(void* parameter) {
  const std::unique_ptr<Pushed> pushed(static_cast<Pushed*>(parameter));
  if (pushed->called) return;
  // The engine does not call an operation whose arrays carry an error; the other ranks must hear of it.
  Request request = std::move(pushed->request);
  request.refusal = "its array carries the error of an earlier operation";
  request.done = [](const std::string*) {};
  pushed->runtime->post(std::move(request));
}

DType known_dtype(int number) {
  if (number < 0 || number >= kDTypeCount)
    throw Error("mykv does not know MXNet's type number " + std::to_string(number));
  return static_cast<DType>(number);
}

struct Description {
  DType dtype;
  size_t count;
  std::string shape;
};

Description describe(const Api& api, Handle array) {
  Description d;
  if (api.storage_type(array) != 0) throw Error("mykv takes dense arrays only");
  const int device = api.context(array).device_type;
  if (device != kCpu && device != kCpuPinned && device != kCpuShared)
    throw Error("mykv takes arrays in CPU memory only");
  d.dtype = known_dtype(api.dtype(array));
  d.shape = api.shape(array, &d.count);
  return d;
}

void require_same(const Description& a, const Description& b) {
  if (a.dtype == b.dtype && a.shape == b.shape) return;
  throw Error(std::string("the arrays of one call differ: ") + dtype_name(a.dtype) + " " + a.shape + " and " +
              dtype_name(b.dtype) + " " + b.shape);
}

}  // namespace

std::string signature_of(const Operation& operation, const std::string& shape) {
  std::string text;
  if (operation.kind == Kind::broadcast) {
    text = "broadcast from rank " + std::to_string(operation.root);
  } else {
    text = std::string("allreduce ") + reduce_op_name(operation.reduce_op);
    if (operation.scale != 1.0) {
      char number[32];
      std::snprintf(number, sizeof number, "%.17g", operation.scale);
      text += std::string(" times ") + number;
    }
  }
  return text + " of " + dtype_name(operation.dtype) + " " + shape;
}

void Bridge::push(const std::shared_ptr<Runtime>& runtime, std::string name, Operation operation,
                  const std::vector<Handle>& inputs, const std::vector<Handle>& outputs) const {
  const std::vector<Handle>& some = inputs.empty() ? outputs : inputs;
  if (some.empty()) throw Error("no array was given");
  const Description first = describe(api_, some[0]);
  for (size_t i = 1; i < inputs.size(); ++i) require_same(first, describe(api_, inputs[i]));
  for (Handle array : outputs) require_same(first, describe(api_, array));
  operation.dtype = first.dtype;
  operation.count = first.count;

  auto pushed = std::make_unique<Pushed>(api_, runtime);
  for (Handle array : outputs) pushed->outputs.push_back(api_.retain(array));
  // Only the root's value travels in a broadcast; elsewhere it was looked at and is left alone.
  if (operation.kind != Kind::broadcast || operation.root == runtime->world().rank()) {
    for (Handle array : inputs) pushed->inputs.push_back(api_.retain(array));
  }
  pushed->request.name = std::move(name);
  pushed->request.signature = signature_of(operation, first.shape);
  pushed->request.operation = operation;
  Storages storages(api_);
  for (Handle array : pushed->outputs) storages.add(array);
  for (Handle array : pushed->inputs) storages.add(array);
  hand_to_engine(std::move(pushed), storages.arrays());
}

std::shared_ptr<const InPlace> Bridge::prepare(Request request, const std::vector<Handle>& arrays) const {
  return std::make_shared<InPlace>(api_, std::move(request), arrays);
}

void Bridge::push(const std::shared_ptr<Runtime>& runtime, const std::shared_ptr<const InPlace>& prepared) const {
  auto pushed = std::make_unique<Pushed>(api_, runtime);
  pushed->request = prepared->request;
  pushed->in_place = prepared;
  hand_to_engine(std::move(pushed), prepared->arrays());
}

void Bridge::hand_to_engine(std::unique_ptr<Pushed> pushed, const std::vector<Handle>& written) const {
  const auto failure = blocking_ ? std::make_shared<std::string>() : nullptr;
  pushed->failure = failure;
  pushed->request.turn = pushed->runtime->take_turn(pushed->request.name);
  const std::string shown = "mykv " + pushed->request.name;
  const int priority = pushed->request.operation.priority;
  void* function = api_.major() == 1 ? reinterpret_cast<void*>(&run_1) : reinterpret_cast<void*>(&run_2);
  Context context{kCpu, 0};
  api_.push(function, pushed.release(), &discard, &context, nullptr, 0, written.data(),
            static_cast<int>(written.size()), priority, shown.c_str());
  if (failure && !failure->empty()) throw FailedOperation("mykv: " + *failure);
}

}  // namespace mykv::mxnet
