// The Python bindings of the core. The module imports without MXNet and never initializes MPI by itself.
#include <mpi.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "base/error.h"
#include "kernels/kernels.h"
#include "mxnet/gradient_norm.h"
#include "python/attached_bridge.h"
#include "python/buckets.h"
#include "python/errors.h"
#include "python/failed_end.h"
#include "python/gpu.h"
#include "python/group.h"
#include "python/groups.h"
#include "python/mpi_exit.h"
#include "python/options.h"
#include "python/stalls.h"
#include "python/statistics.h"
#include "python/timeline.h"
#include "world/revoke_on_death.h"

namespace py = pybind11;

namespace mykv {
namespace {

void init(int comm, const py::dict& given) {
  if (world_group()) throw Error("mykv is initialized already");
  const RuntimeOptions options = options_from(given);
  watch_finalize();
  world_group() = std::make_shared<Group>(MPI_Comm_f2c(comm), options);
}

std::shared_ptr<Group> make_group(int comm, std::vector<int> labels, const py::dict& given) {
  constexpr size_t kMostAddressSpace = size_t{1} << 40;  // there may be dozens of groups
  require_world();
  RuntimeOptions options = options_from(given);
  int size = 0;
  MPI_Comm_size(MPI_Comm_f2c(comm), &size);
  if (labels.size() != static_cast<size_t>(size)) {
    throw py::value_error("labels must have one number for each of the " + std::to_string(size) + " ranks");
  }
  options.world.labels = std::move(labels);
  options.world.most_address_space = kMostAddressSpace;
  return std::make_shared<Group>(MPI_Comm_f2c(comm), options);
}

void shutdown() {
  if (!world_group() || world_group()->forked()) return;
  const std::shared_ptr<Group> last = std::move(world_group());
  world_group().reset();
  py::gil_scoped_release release;
  leave_all("it shut mykv down");
}

void abandon(const std::string& reason) {
  py::gil_scoped_release release;
  leave_all(reason);
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
  const std::shared_ptr<Group> group = world_group();
  for (const auto& [name, reason] :
       transport_report(group ? &group->world() : nullptr, group ? &group->gpus() : nullptr))
    result[name.c_str()] = reason;
  return result;
}

// Binds a method of Group, and a function of the module that calls it on the world.
template <class Class, class Result, class... Arguments, class... Extra>
void bind_method(py::module_& m, Class& group, const char* name, Result (Group::*method)(Arguments...),
                 const Extra&... extra) {
  group.def(name, method, extra...);
  m.def(
      name,
      [method](Arguments... arguments) {
        // Another thread may shut the world down while this thread is in here without the GIL.
        const std::shared_ptr<Group> kept = require_world();
        return ((*kept).*method)(std::forward<Arguments>(arguments)...);
      },
      extra...);
}

// The same for a number or a list of the group's world.
template <class Class, class Get>
void bind_fact(py::module_& m, Class& group, const char* name, Get get) {
  group.def(name, [get](const Group& g) { return get(g.world()); });
  m.def(name, [get] { return get(require_world()->world()); });
}

}  // namespace
}  // namespace mykv

PYBIND11_MODULE(mykv_core, m) {
  using namespace mykv;
  m.doc() = "The compiled core of mykv: collective operations over shared memory and MPI.";
  bind_errors(m);

  m.def("init", &init, py::arg("comm"), py::arg("options") = py::dict(),
        "Start the runtime over a communicator (its Fortran handle). Collective.");
  m.def("shutdown", &shutdown, "Stop the runtime. The operations that other ranks still have fail.");
  m.def("abandon", &abandon, py::arg("reason"), "Tell the other ranks that this one goes, and stop.");
  m.def(
      "lose",
      [](const std::string& reason, std::vector<int> ranks) { lose_all({reason, ErrorCode::dead, std::move(ranks)}); },
      py::arg("reason"), py::arg("ranks") = std::vector<int>(), py::call_guard<py::gil_scoped_release>(),
      "Processes have died: end all operations of this one, at once, with the reason. `ranks`: theirs, if known.");
  m.def(
      "watch", [](bool on) { Runtime::watched().store(on); }, py::arg("on"),
      "Whether lose() is called soon after a process has died: then errors that come from a death name it.");
  m.def("begin_again", &RevokeOnDeath::begin_again,
        "After lose(): those that are left know of each other, and will init().");
  m.def("is_initialized", [] { return static_cast<bool>(world_group()); });
  m.def("transports", &transports, "Each transport, with the reason why it is not in use ('' where it is).");
  m.def("build_info", &build_info);
  m.def("mpi_library_version", &mpi_library_version, "Version text of the MPI library that is loaded.");

  py::class_<Work>(m, "Work", "A request on numpy buffers under way.")
      .def("wait", &Work::wait, py::arg("timeout") = -1.0,
           "True when done, False when `timeout` seconds are over; raises Error.")
      .def("done", &Work::done);

  py::class_<Group, std::shared_ptr<Group>> group(
      m, "Group",
      "Ranks that work together, with a runtime and shared memory of their own. Its methods are those of the module,\n"
      "which act on the world; ranks and roots count within the group, messages call ranks by their labels.");
  m.def("make_group", &make_group, py::arg("comm"), py::arg("labels"), py::arg("options") = py::dict(),
        "A Group over a communicator (its Fortran handle). Collective over it. labels[r]: what messages call rank r.");
  m.def("world", [] { return world_group(); }, "The Group of init(), or None.");
  bind_fact(m, group, "rank", [](const World& w) { return w.rank(); });
  bind_fact(m, group, "size", [](const World& w) { return w.size(); });
  bind_fact(m, group, "local_rank", [](const World& w) { return w.local_rank(); });
  bind_fact(m, group, "local_size", [](const World& w) { return w.local_size(); });
  bind_fact(m, group, "cross_rank", [](const World& w) { return w.cross_rank(); });
  bind_fact(m, group, "cross_size", [](const World& w) { return w.cross_size(); });
  bind_fact(m, group, "lonely", [](const World& w) { return w.lonely(); });
  bind_fact(m, group, "strangers", [](const World& w) { return w.strangers(); });
  bind_method(m, group, "agreement_traffic", &Group::agreement_traffic);
  bind_method(m, group, "gpu_road", &Group::gpu_road,
              "(whether some rank has a GPU, whether NCCL serves all ranks, why not).");
  bind_fact(m, group, "host_ranks", [](const World& w) { return w.hosts(); });
  group.def("abandon", &Group::abandon, py::arg("reason"), "Tell the other ranks that this one goes, and stop.");
  group.def("shutdown", [](Group& g) { g.abandon("it shut mykv down"); });

  const auto op = py::arg("op") = "sum";
  const auto scale = py::arg("scale") = 1.0;
  const auto root = py::arg("root") = 0;
  const auto priority = py::arg("priority") = 0;
  const auto label = py::arg("label") = "";
  const auto wire = py::arg("wire") = "";  // between hosts: a type of values, or a compressor; '': unchanged
  const py::arg name("name"), inputs("inputs"), outputs("outputs"), input("input"), output("output"), rows("rows");
  bind_method(m, group, "submit_allreduce", &Group::submit_allreduce, name, inputs, outputs, op, scale, priority, label,
              wire);
  bind_method(m, group, "submit_broadcast", &Group::submit_broadcast, name, input, outputs, root, priority, label);
  bind_method(m, group, "submit_on_gpu", &Group::submit_on_gpu, name, py::arg("kind"), py::arg("dtype"),
              py::arg("shape"), py::arg("memory"), op, scale, root, priority, label, wire);
  bind_method(m, group, "push_allreduce", &Group::push_allreduce, name, inputs, outputs, op, scale, priority, label,
              wire);
  bind_method(m, group, "push_broadcast", &Group::push_broadcast, name, input, outputs, root, priority, label);
  bind_method(m, group, "push_group", &Group::push_group, name, inputs, outputs, op, scale, priority, label, wire);
  bind_method(m, group, "push_allgather", &Group::push_allgather, name, input, output, rows, priority, label);
  bind_method(m, group, "push_alltoall", &Group::push_alltoall, name, input, output, rows, priority, label);
  bind_method(m, group, "push_reducescatter", &Group::push_reducescatter, name, input, output, op, scale, priority,
              label, wire);
  const py::arg arrays("arrays"), division("division");
  bind_method(m, group, "push_reduce_to_owners", &Group::push_reduce_to_owners, name, arrays, division, py::arg("own"),
              py::arg("next") = Handles(), op, scale, priority, label, wire);
  bind_method(m, group, "push_gather_from_owners", &Group::push_gather_from_owners, name, arrays, division, priority,
              label, py::arg("turn_of") = "", py::arg("fenced") = Handles());
  bind_method(m, group, "refuse", &Group::refuse, name, py::arg("reason"), py::arg("turn_of") = "");
  bind_method(
      m, group, "waiting", &Group::waiting, py::arg("name") = "", py::arg("least_seconds") = 0.0,
      "For whom operations under way wait: (name, seconds, ranks that have not come, ranks that do not respond),\n"
      "the longest wait first. Asks the other hosts.");
  bind_method(
      m, group, "waiting_for_this", &Group::waiting_for_this, py::arg("names"), py::arg("turn_of") = "",
      "For each name the ranks that have come to the operation which this rank will ask for next under it; with\n"
      "turn_of to the one that has the last turn under that name.");
  bind_method(m, group, "forget", &Group::forget, py::arg("prefix"),
              "Drop what is kept for names that begin with this, after the last call under them.");
  bind_method(
      m, group, "give_up", &Group::give_up, name, py::arg("reason"), py::arg("code") = "given_up",
      py::arg("ranks") = std::vector<int>(),
      "End what is under way under `name`, on all ranks, unless all of them have come. The error has this code\n"
      "and names these ranks.");
  bind_method(m, group, "reserve", &Group::reserve, py::arg("nbytes"));
  bind_method(m, group, "allocate", &Group::allocate, py::arg("nbytes"));
  bind_method(m, group, "submit_bucket", &Group::submit_bucket, name, py::arg("buffer"), py::arg("begin"),
              py::arg("count"), py::arg("dtype"), py::arg("layout") = "", op, scale, priority, wire,
              py::arg("shards") = BucketShards());

  py::class_<Buffer, std::shared_ptr<Buffer>>(m, "Buffer", py::buffer_protocol(),
                                              "Memory in the host's shared segment, zeroed; keeps the core alive.")
      .def_buffer([](const Buffer& b) {
        return py::buffer_info(b.data(), 1, py::format_descriptor<uint8_t>::format(),
                               static_cast<py::ssize_t>(b.bytes()));
      })
      .def("commit", &Buffer::commit, py::arg("nbytes"), py::call_guard<py::gil_scoped_release>(),
           "Take memory for the first `nbytes` bytes; raises Error when there is none left.")
      .def_property_readonly(
          "attached", [](const Buffer& b) { return !b.runtime()->left(); }, "Whether its group still runs.")
      .def_property_readonly("nbytes", &Buffer::bytes);
  bind_gpu(m);
  py::class_<PreparedBucket>(
      m, "PreparedBucket", "The same as an operation of MXNet's engine that writes `arrays`, which lie in the bucket.")
      .def(py::init<const std::string&, std::shared_ptr<Buffer>, size_t, size_t, const std::string&, const std::string&,
                    const std::vector<uintptr_t>&, const std::string&, double, int, const std::string&,
                    const BucketShards&>(),
           py::arg("name"), py::arg("buffer"), py::arg("begin"), py::arg("count"), py::arg("dtype"), py::arg("layout"),
           py::arg("arrays"), py::arg("op") = "sum", py::arg("scale") = 1.0, py::arg("priority") = 0,
           py::arg("wire") = "", py::arg("shards") = BucketShards())
      .def(py::init<const std::string&, const std::shared_ptr<Group>&, const std::shared_ptr<gpu::Memory>&, size_t,
                    size_t, const std::string&, const std::string&, const std::vector<uintptr_t>&, const std::string&,
                    double, int, const std::string&, const BucketShards&>(),
           py::arg("name"), py::arg("group"), py::arg("memory"), py::arg("begin"), py::arg("count"), py::arg("dtype"),
           py::arg("layout"), py::arg("arrays"), py::arg("op") = "sum", py::arg("scale") = 1.0, py::arg("priority") = 0,
           py::arg("wire") = "", py::arg("shards") = BucketShards())
      .def("push", &PreparedBucket::push, py::arg("label") = "", py::arg("turn_of") = "",
           "Start it once more. The label must be the same on all ranks, and shows in the error where it is not. With\n"
           "turn_of it takes the last turn under that name.");

  py::class_<Fence>(
      m, "Fence",
      "An operation of MXNet's engine without effect: reading one of its arrays waits for all operations\n"
      "that were pushed on any of its arrays.")
      .def(py::init<const Handles&>(), py::arg("arrays"))
      .def("push", &Fence::push, py::arg("ends_step") = false,
           "Put it behind the operations that are pushed by now. With ends_step these are updates of a step.");

  m.def("push_sum_of_squares", &push_sum_of_squares, py::arg("pieces"), py::arg("squares"), py::arg("more") = 0.0,
        py::arg("priority") = 0,
        "squares[0] = more + the sum of squares of (array, begin, count) pieces, in this rank's engine alone.");
  m.def("push_clip", &push_clip, arrays, py::arg("squares"), py::arg("factor"), py::arg("most"),
        py::arg("priority") = 0, "Scale arrays so that factor * sqrt(squares[0]) would be at most `most`.");
  m.def("clipping_factor", &mxnet::clipping_factor, py::arg("squares"), py::arg("factor"), py::arg("most"),
        "The factor by which push_clip scales arrays.");
  m.def("failed_operations", &mxnet::failed_operations,
        "How many operations on MXNet's arrays have failed in this process.");
  m.def(
      "failures",
      [] {
        py::dict result;
        for (const auto& [code, failed] : mxnet::failures()) {
          result[name_of(code)] = std::make_pair(failed.operations, failed.last);
        }
        return result;
      },
      "The same by the `code` of their errors: (how many, the text of the last error). Arrays carry the texts only.");
  m.def(
      "attach_mxnet",
      [](uintptr_t library, int major, bool blocking, const py::object& error_type) {
        set_failure_type(error_type);
        attach_bridge(std::make_unique<mxnet::Bridge>(mxnet::Api(reinterpret_cast<void*>(library), major), blocking));
      },
      py::arg("dl_handle"), py::arg("major"), py::arg("blocking") = false, py::arg("error_type") = py::none(),
      "Use the MXNet library behind this dlopen handle. With an engine that blocks in each push (NaiveEngine), push_*\n"
      "raises `error_type` when an operation fails; otherwise the error is in the operation's arrays.");
  m.def(
      "push_failing", [](uintptr_t array) { bridge().push_failing(reinterpret_cast<mxnet::Handle>(array)); },
      py::arg("array"), py::call_guard<py::gil_scoped_release>(), "An operation of MXNet's engine that only fails.");
  bind_timeline(m);
  bind_statistics(m, group);
  bind_mpi_exit(m);
  bind_failed_end(m);
  m.def("begin_stall_watch", &begin_stall_watch);
  m.def("end_stall_watch", &end_stall_watch, "Make next_stalls() return None.");
  m.def("next_stalls", &next_stalls, py::arg("warn_seconds"), py::arg("abort_seconds"),
        "Wait until operations of this process stall, or go on again: a list of (whether they go on, sentence).");
  m.def("kernel_path", &kernel_path);
  m.def("select_kernel_path", &select_kernel_path, py::arg("name"));
}
