// The Python face of the core. It imports without MXNet and never starts MPI by itself.
#include <mpi.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>

#include "kernels/kernels.h"
#include "mxnet/bridge.h"
#include "runtime/buffer.h"
#include "runtime/error.h"
#include "runtime/runtime.h"

namespace py = pybind11;

namespace mykv {
namespace {

// The process's one runtime, guarded by the GIL. After abandon() it stays, stopped, for engine operations that still
// come. Both are never destroyed: at exit the engine, and a forked child, may still hold on to what they lead to.
std::shared_ptr<Runtime>& g_runtime = *new std::shared_ptr<Runtime>;
std::unique_ptr<mxnet::Bridge>& g_bridge = *new std::unique_ptr<mxnet::Bridge>;

py::object* g_failure_type = new py::object;  // MXNetError, for operations that fail inside a push

std::shared_ptr<Runtime> runtime() {
  if (!g_runtime) throw Error("mykv is not initialized: call kvstore_plugin.init() first");
  return g_runtime;
}

RuntimeOptions options_from(const py::dict& given) {
  RuntimeOptions options;
  for (const auto& item : given) {
    const auto key = py::cast<std::string>(item.first);
    if (key == "virtual_hosts") {
      options.world.virtual_hosts = py::cast<int>(item.second);
    } else if (key == "part_bytes") {
      options.part_bytes = py::cast<size_t>(item.second);
    } else if (key == "staging_bytes") {
      options.staging_bytes = py::cast<size_t>(item.second);
    } else {
      throw py::value_error("mykv_core.init() has no option '" + key + "'");
    }
  }
  return options;
}

// MPI_Finalize begins by deleting the attributes of MPI_COMM_SELF (MPI 4.0, 11.2.4): the moment for the runtime to go,
// however the process came to end, since no thread may talk MPI after it.
int leave_at_finalize(MPI_Comm, int, void*, void*) {
  if (g_runtime) g_runtime->leave("its process has ended");
  return MPI_SUCCESS;
}

void watch_finalize() {
  static int key = MPI_KEYVAL_INVALID;
  if (key != MPI_KEYVAL_INVALID) return;
  MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, &leave_at_finalize, &key, nullptr);
  MPI_Comm_set_attr(MPI_COMM_SELF, key, nullptr);
}

void init(int comm, const py::dict& given) {
  if (g_runtime) throw Error("mykv is initialized already");
  const RuntimeOptions options = options_from(given);
  std::shared_ptr<Runtime> made;
  {
    py::gil_scoped_release release;
    watch_finalize();
    made = std::make_shared<Runtime>(MPI_Comm_f2c(comm), options);
  }
  g_runtime = std::move(made);
}

void shutdown() {
  if (!g_runtime || g_runtime->forked()) return;
  std::shared_ptr<Runtime> last = std::move(g_runtime);
  g_runtime.reset();
  py::gil_scoped_release release;
  last->leave("it shut mykv down");
  last.reset();
}

void abandon(const std::string& reason) {
  const std::shared_ptr<Runtime> leaving = g_runtime;
  if (!leaving) return;
  py::gil_scoped_release release;
  leaving->leave(reason);
}

Operation allreduce_operation(const std::string& op, double scale, int priority) {
  Operation operation;
  operation.kind = Kind::allreduce;
  if (!reduce_op_from_name(op, &operation.reduce_op)) throw py::value_error("mykv has no operation '" + op + "'");
  operation.scale = scale;
  operation.priority = priority;
  return operation;
}

Operation broadcast_operation(int root, int priority) {
  if (root < 0 || root >= runtime()->world().size()) {
    throw py::value_error("root rank " + std::to_string(root) + " is not among the " +
                          std::to_string(runtime()->world().size()) + " ranks");
  }
  Operation operation;
  operation.kind = Kind::broadcast;
  operation.root = root;
  operation.priority = priority;
  return operation;
}

// A request on numpy buffers under way.
class Work {
 public:
  explicit Work(std::vector<py::array> kept) : kept_(std::move(kept)) {}
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;
  // The buffers are the core's until the end.
  ~Work() {
    if (getpid() != process_) return;  // nobody finishes it in a fork
    py::gil_scoped_release release;
    std::unique_lock<std::mutex> lock(state_->mutex);
    state_->changed.wait(lock, [this] { return state_->done; });
  }

  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    std::optional<std::string> error;
  };
  std::shared_ptr<State> state() const { return state_; }

  bool wait(double timeout) {
    py::gil_scoped_release release;
    std::unique_lock<std::mutex> lock(state_->mutex);
    const auto over = [this] { return state_->done; };
    if (timeout < 0) {
      state_->changed.wait(lock, over);
    } else if (!state_->changed.wait_for(lock, std::chrono::duration<double>(timeout), over)) {
      return false;
    }
    if (state_->error) throw Error(*state_->error);
    return true;
  }
  bool done() {
    std::lock_guard<std::mutex> lock(state_->mutex);
    return state_->done;
  }

 private:
  const pid_t process_ = getpid();
  std::vector<py::array> kept_;
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

DType dtype_of(const py::array& array) {
  DType dtype;
  const auto name = py::cast<std::string>(py::str(array.dtype()));
  if (!dtype_from_name(name, &dtype)) throw py::value_error("mykv does not know the dtype '" + name + "'");
  return dtype;
}

void require_contiguous(const py::array& array, bool writeable) {
  if (!(array.flags() & py::array::c_style)) throw py::value_error("mykv takes C-contiguous arrays only");
  if (writeable && !array.writeable()) throw py::value_error("an output array is read-only");
}

std::unique_ptr<Work> post(Request request, std::vector<py::array> kept) {
  const std::shared_ptr<Runtime> target = runtime();
  request.turn = target->take_turn(request.name);
  auto work = std::make_unique<Work>(std::move(kept));
  request.done = [state = work->state()](const std::string* error) {
    std::lock_guard<std::mutex> lock(state->mutex);
    if (error != nullptr) state->error = *error;
    state->done = true;
    state->changed.notify_all();
  };
  py::gil_scoped_release release;
  target->post(std::move(request));
  return work;
}

std::unique_ptr<Work> submit(const std::string& name, Operation operation, const std::vector<py::array>& inputs,
                             const std::vector<py::array>& outputs) {
  const std::vector<py::array>& some = inputs.empty() ? outputs : inputs;
  if (some.empty()) throw py::value_error("no array was given");
  Request request;
  request.name = name;
  operation.dtype = dtype_of(some[0]);
  operation.count = static_cast<size_t>(some[0].size());
  const auto shape = py::cast<std::string>(py::str(some[0].attr("shape")));
  std::vector<py::array> kept;
  for (const std::vector<py::array>* arrays : {&inputs, &outputs}) {
    for (const py::array& array : *arrays) {
      require_contiguous(array, arrays == &outputs);
      if (dtype_of(array) != operation.dtype || py::cast<std::string>(py::str(array.attr("shape"))) != shape) {
        throw py::value_error("the arrays of one call differ in shape or dtype");
      }
      kept.push_back(array);
    }
  }
  for (const py::array& array : inputs) {
    // One array is copied byte by byte if need be; several are summed where they lie.
    if (inputs.size() > 1 && !(array.flags() & py::detail::npy_api::NPY_ARRAY_ALIGNED_)) {
      throw py::value_error("one of several input arrays is not aligned to its items");
    }
    request.inputs.push_back(array.data());
  }
  for (const py::array& array : outputs) request.outputs.push_back(const_cast<void*>(array.data()));
  request.operation = operation;
  request.signature = mxnet::signature_of(operation, shape);
  return post(std::move(request), std::move(kept));
}

std::unique_ptr<Work> submit_allreduce(const std::string& name, const std::vector<py::array>& inputs,
                                       const std::vector<py::array>& outputs, const std::string& op, double scale,
                                       int priority) {
  if (inputs.empty()) throw py::value_error("an allreduce needs an input array");
  return submit(name, allreduce_operation(op, scale, priority), inputs, outputs);
}

std::unique_ptr<Work> submit_broadcast(const std::string& name, const std::optional<py::array>& input,
                                       const std::vector<py::array>& outputs, int root, int priority) {
  std::vector<py::array> inputs;
  if (input) inputs.push_back(*input);
  if (!input && root == runtime()->world().rank())
    throw py::value_error("the root of a broadcast needs an input array");
  return submit(name, broadcast_operation(root, priority), inputs, outputs);
}

std::shared_ptr<Buffer> reserve(size_t bytes) { return runtime()->reserve(bytes); }

std::shared_ptr<Buffer> allocate(size_t bytes) {
  const std::shared_ptr<Buffer> buffer = runtime()->reserve(bytes);
  py::gil_scoped_release release;
  buffer->commit(bytes);
  return buffer;
}

void require_attached(const Buffer& buffer) {
  if (&buffer.runtime() != runtime().get()) throw Error("the buffer is of a runtime that was shut down");
}

// The elements [begin, begin + count) of a buffer, as a request in place.
Request request_in_place(const std::string& name, const std::shared_ptr<Buffer>& buffer, size_t begin,
                         const std::string& layout, Operation operation) {
  require_attached(*buffer);
  operation.in_place = true;
  const size_t width = item_size(operation.dtype);
  if (begin + operation.count > buffer->bytes() / width) throw py::value_error("the bucket does not lie in the buffer");
  Request request;
  request.name = name;
  request.operation = operation;
  request.signature = mxnet::signature_of(operation, "(" + std::to_string(operation.count) + ",) in place " + layout);
  request.in_place = buffer->offset() + begin * width;
  request.owner = buffer;
  return request;
}

std::unique_ptr<Work> submit_bucket(const std::string& name, const std::shared_ptr<Buffer>& buffer, size_t begin,
                                    size_t count, const std::string& dtype, const std::string& layout,
                                    const std::string& op, double scale, int priority) {
  Operation operation = allreduce_operation(op, scale, priority);
  if (!dtype_from_name(dtype, &operation.dtype)) throw py::value_error("mykv does not know the dtype '" + dtype + "'");
  operation.count = count;
  return post(request_in_place(name, buffer, begin, layout, operation), {});
}

std::vector<mxnet::Handle> handles(const std::vector<uintptr_t>& numbers) {
  std::vector<mxnet::Handle> result;
  result.reserve(numbers.size());
  for (uintptr_t number : numbers) result.push_back(reinterpret_cast<mxnet::Handle>(number));
  return result;
}

void push(const std::string& name, const Operation& operation, const std::vector<uintptr_t>& inputs,
          const std::vector<uintptr_t>& outputs) {
  if (!g_bridge) throw Error("mykv is not attached to MXNet");
  const std::shared_ptr<Runtime> target = runtime();
  py::gil_scoped_release release;
  g_bridge->push(target, name, operation, handles(inputs), handles(outputs));
}

void push_allreduce(const std::string& name, const std::vector<uintptr_t>& inputs,
                    const std::vector<uintptr_t>& outputs, const std::string& op, double scale, int priority) {
  if (inputs.empty()) throw py::value_error("an allreduce needs an input array");
  push(name, allreduce_operation(op, scale, priority), inputs, outputs);
}

// An operation on a bucket that lies in the segment, pushed once for each step.
class PreparedBucket {
 public:
  PreparedBucket(const std::string& name, std::shared_ptr<Buffer> buffer, size_t begin, size_t count,
                 const std::string& dtype, const std::string& layout, const std::vector<uintptr_t>& arrays,
                 const std::string& op, double scale, int priority)
      : buffer_(std::move(buffer)) {
    if (!g_bridge) throw Error("mykv is not attached to MXNet");
    Operation operation = allreduce_operation(op, scale, priority);
    if (!dtype_from_name(dtype, &operation.dtype))
      throw py::value_error("mykv does not know the dtype '" + dtype + "'");
    operation.count = count;
    prepared_ = g_bridge->prepare(request_in_place(name, buffer_, begin, layout, operation), handles(arrays));
  }

  void push() const {
    const std::shared_ptr<Runtime> target = runtime();
    require_attached(*buffer_);
    py::gil_scoped_release release;
    g_bridge->push(target, prepared_);
  }

 private:
  std::shared_ptr<Buffer> buffer_;
  std::shared_ptr<const mxnet::InPlace> prepared_;
};

void push_broadcast(const std::string& name, uintptr_t input, const std::vector<uintptr_t>& outputs, int root,
                    int priority) {
  push(name, broadcast_operation(root, priority), {input}, outputs);
}

void refuse(const std::string& name, const std::string& reason) {
  Request request;
  request.name = name;
  const std::shared_ptr<Runtime> target = runtime();
  request.turn = target->take_turn(name);
  request.signature = "a refusal";
  request.refusal = reason.empty() ? "no reason was given" : reason;
  request.done = [](const std::string*) {};
  py::gil_scoped_release release;
  target->post(std::move(request));
}

py::dict build_info() {
  py::dict info;
  info["version"] = MYKV_VERSION;
  info["mpi"] = MYKV_MPI_BUILD;
  info["compiler"] = __VERSION__;
  py::list kernels;
  for (const char* path : kernel_paths_built()) kernels.append(path);
  info["kernels"] = kernels;
  info["kernel"] = kernel_path();
  return info;
}

std::string mpi_library_version() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(text, &length);
  return std::string(text, static_cast<size_t>(length));
}

py::dict transports() {
  py::dict result;
  for (const auto& [name, reason] : transport_report(g_runtime ? &g_runtime->world() : nullptr))
    result[name.c_str()] = reason;
  return result;
}

}  // namespace
}  // namespace mykv

PYBIND11_MODULE(mykv_core, m) {
  using namespace mykv;
  m.doc() = "The compiled core of mykv: collective operations over shared memory and MPI.";
  py::register_exception<Error>(m, "Error", PyExc_RuntimeError);
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const mxnet::FailedOperation& error) {
      PyObject* type = *g_failure_type && !g_failure_type->is_none() ? g_failure_type->ptr() : PyExc_RuntimeError;
      PyErr_SetString(type, error.what());
    }
  });

  m.def("init", &init, py::arg("comm"), py::arg("options") = py::dict(),
        "Start the runtime over a communicator (its Fortran handle). Collective.");
  m.def("shutdown", &shutdown, "Stop the runtime. The operations that other ranks still have fail.");
  m.def("abandon", &abandon, py::arg("reason"), "Tell the other ranks that this one goes, and stop.");
  m.def("is_initialized", [] { return static_cast<bool>(g_runtime); });
  m.def("rank", [] { return runtime()->world().rank(); });
  m.def("size", [] { return runtime()->world().size(); });
  m.def("local_rank", [] { return runtime()->world().local_rank(); });
  m.def("local_size", [] { return runtime()->world().local_size(); });
  m.def("cross_rank", [] { return runtime()->world().cross_rank(); });
  m.def("cross_size", [] { return runtime()->world().cross_size(); });
  m.def("host_ranks", [] { return runtime()->world().hosts(); }, "Global ranks on each host.");
  m.def("transports", &transports, "Each transport, with the reason why it is not in use ('' where it is).");
  m.def("build_info", &build_info);
  m.def("mpi_library_version", &mpi_library_version, "Version text of the MPI library that is loaded.");

  py::class_<Work>(m, "Work", "A request on numpy buffers under way.")
      .def("wait", &Work::wait, py::arg("timeout") = -1.0,
           "True when done, False when `timeout` seconds are over; raises Error.")
      .def("done", &Work::done);
  m.def("submit_allreduce", &submit_allreduce, py::arg("name"), py::arg("inputs"), py::arg("outputs"),
        py::arg("op") = "sum", py::arg("scale") = 1.0, py::arg("priority") = 0);
  m.def("submit_broadcast", &submit_broadcast, py::arg("name"), py::arg("input"), py::arg("outputs"),
        py::arg("root") = 0, py::arg("priority") = 0);

  py::class_<Buffer, std::shared_ptr<Buffer>>(m, "Buffer", py::buffer_protocol(),
                                              "Memory in the host's shared segment, zeroed; keeps the core alive.")
      .def_buffer([](const Buffer& b) {
        return py::buffer_info(b.data(), 1, py::format_descriptor<uint8_t>::format(),
                               static_cast<py::ssize_t>(b.bytes()));
      })
      .def("commit", &Buffer::commit, py::arg("nbytes"), py::call_guard<py::gil_scoped_release>(),
           "Take memory for the first `nbytes` bytes; raises Error when there is none left.")
      .def_property_readonly(
          "attached", [](const Buffer& b) { return &b.runtime() == g_runtime.get(); },
          "Whether the core that it was made by is the one that runs.")
      .def_property_readonly("nbytes", &Buffer::bytes);
  m.def("reserve", &reserve, py::arg("nbytes"),
        "A Buffer of so many bytes of addresses, without memory before commit().");
  m.def("allocate", &allocate, py::arg("nbytes"), "A Buffer of so many bytes, 64-byte aligned.");
  m.def("submit_bucket", &submit_bucket, py::arg("name"), py::arg("buffer"), py::arg("begin"), py::arg("count"),
        py::arg("dtype"), py::arg("layout") = "", py::arg("op") = "sum", py::arg("scale") = 1.0,
        py::arg("priority") = 0,
        "Allreduce elements [begin, begin + count) of a Buffer in place. `layout` must be equal on all ranks.");
  py::class_<PreparedBucket>(
      m, "PreparedBucket", "The same as an operation of MXNet's engine that writes `arrays`, which lie in the bucket.")
      .def(py::init<const std::string&, std::shared_ptr<Buffer>, size_t, size_t, const std::string&, const std::string&,
                    const std::vector<uintptr_t>&, const std::string&, double, int>(),
           py::arg("name"), py::arg("buffer"), py::arg("begin"), py::arg("count"), py::arg("dtype"), py::arg("layout"),
           py::arg("arrays"), py::arg("op") = "sum", py::arg("scale") = 1.0, py::arg("priority") = 0)
      .def("push", &PreparedBucket::push, "Start it once more.");

  m.def(
      "attach_mxnet",
      [](uintptr_t library, int major, bool blocking, const py::object& error_type) {
        *g_failure_type = error_type;
        g_bridge = std::make_unique<mxnet::Bridge>(mxnet::Api(reinterpret_cast<void*>(library), major), blocking);
      },
      py::arg("dl_handle"), py::arg("major"), py::arg("blocking") = false, py::arg("error_type") = py::none(),
      "Use the MXNet library behind this dlopen handle. With an engine that blocks in each push (NaiveEngine), push_*\n"
      "raises `error_type` when an operation fails; otherwise the error is in the operation's arrays.");
  m.def("push_allreduce", &push_allreduce, py::arg("name"), py::arg("inputs"), py::arg("outputs"),
        py::arg("op") = "sum", py::arg("scale") = 1.0, py::arg("priority") = 0);
  m.def("push_broadcast", &push_broadcast, py::arg("name"), py::arg("input"), py::arg("outputs"), py::arg("root") = 0,
        py::arg("priority") = 0);
  m.def("refuse", &refuse, py::arg("name"), py::arg("reason"), "Take this rank's turn under `name` with a refusal.");
  m.def(
      "forget",
      [](const std::string& prefix) {
        if (g_runtime) g_runtime->forget(prefix);
      },
      py::arg("prefix"));
  m.def("kernel_path", &kernel_path);
  m.def("select_kernel_path", &select_kernel_path, py::arg("name"));
}
