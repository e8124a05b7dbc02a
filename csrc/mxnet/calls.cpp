#include "mxnet/calls.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "base/error.h"
#include "compress/compressor.h"
#include "operations/signature.h"

namespace mykv::mxnet {

namespace {

DType known_dtype(int number) {
  if (number < 0 || number >= kDTypeCount)
    throw Error("mykv does not know MXNet's type number " + std::to_string(number));
  return static_cast<DType>(number);
}

}  // namespace

size_t Description::count() const {
  return std::accumulate(shape.begin(), shape.end(), size_t{1}, std::multiplies<>());
}

size_t Description::row_elements() const {
  return std::accumulate(shape.begin() + 1, shape.end(), size_t{1}, std::multiplies<>());
}

std::string Description::text() const { return std::string(dtype_name(dtype)) + " " + shape_text(shape); }

Description describe(const Api& api, Handle array) {
  if (api.storage_type(array) != 0)
    throw Error("mykv takes dense arrays, and this array is sparse. Convert it with tostype('default') first");
  const Context context = api.context(array);
  const int type = context.device_type;
  if (type != kCpu && type != kCpuPinned && type != kCpuShared && type != kGpu)
    throw Error("mykv takes arrays in the memory of CPUs and GPUs only");
  return {known_dtype(api.dtype(array)), api.shape(array), type == kGpu ? context.device_id : -1};
}

namespace {

std::string device_text(int gpu) { return gpu < 0 ? "in host memory" : "on GPU " + std::to_string(gpu); }

// The error for arrays of one call on these different devices.
Error different_devices(const std::string& what, int one, int other) {
  return Error(what + " are on different devices: " + device_text(one) + " and " + device_text(other) +
               ". Copy them to one device first");
}

// The location of a request's arrays: all in host memory, or all on GPUs.
class Devices {
 public:
  void read(const Description& array) { add(array, &memory_.inputs); }
  void written(const Description& array) { add(array, &memory_.outputs); }
  // For a scattered request, whose memory must all be on one device.
  void all_on(const Description& array) {
    if (any_ && memory_.inputs[0] != array.gpu)
      throw different_devices("the arrays of one call", memory_.inputs[0], array.gpu);
    if (any_) return;
    read(array);
    written(array);
  }

  // Null if the arrays are in host memory.
  std::shared_ptr<const DeviceMemory> memory() const {
    return any_ && on_gpu_ ? std::make_shared<const DeviceMemory>(memory_) : nullptr;
  }

 private:
  void add(const Description& array, std::vector<int>* list) {
    const bool on_gpu = array.gpu >= 0;
    if (any_ && on_gpu != on_gpu_) throw different_devices("the arrays of one call", gpu_, array.gpu);
    any_ = true;
    on_gpu_ = on_gpu;
    gpu_ = array.gpu;
    list->push_back(array.gpu);
  }

  bool any_ = false;
  bool on_gpu_ = false;
  int gpu_ = -1;  // GPU of the last array; -1: host memory
  DeviceMemory memory_;
};

const Description& require_same(const Description& a, const Description& b) {
  if (a.dtype == b.dtype && a.shape == b.shape) return b;
  throw Error("the arrays of one call differ: " + a.text() + " and " + b.text() +
              ". Give all the same shape and dtype");
}

void require_pairs(const std::vector<Handle>& inputs, const std::vector<Handle>& outputs) {
  if (inputs.empty()) throw Error("no array was given");
  if (inputs.size() == outputs.size()) return;
  throw Error("a group of " + std::to_string(inputs.size()) + " inputs needs as many outputs, not " +
              std::to_string(outputs.size()) + ". Give an output for each input");
}

// Checks an input and an output whose rows are moved: they may differ only in the number of rows.
Description describe_rows(const Api& api, Handle input, Handle output, size_t input_rows, size_t output_rows,
                          Devices* devices) {
  const Description in = describe(api, input), out = describe(api, output);
  devices->all_on(in);
  devices->all_on(out);
  if (in.shape.empty() || out.shape.empty()) throw Error("a scalar has no rows");
  if (in.dtype != out.dtype ||
      !std::equal(in.shape.begin() + 1, in.shape.end(), out.shape.begin() + 1, out.shape.end()))
    throw Error("the rows of input and output differ: " + in.text() + " and " + out.text());
  if (in.shape[0] != input_rows || out.shape[0] != output_rows) {
    throw Error("the input must have " + std::to_string(input_rows) + " rows and the output " +
                std::to_string(output_rows) + ", but they are " + in.text() + " and " + out.text());
  }
  return in;
}

Request request_for(const Common& common, const std::string& name, const Operation& operation, const std::string& shape,
                    const Devices& devices, std::shared_ptr<const std::vector<Shard>> shards = nullptr,
                    bool in_pieces = false) {
  Request request;
  request.name = name;
  request.operation = operation;
  request.devices = devices.memory();
  if (request.devices)
    request.operation.road =
        common.runtime->gpus().road_of(operation, *request.devices, shards != nullptr || in_pieces);
  request.signature =
      signature_of(request.operation, shape, common.runtime->world().label(operation.root), common.label, shards.get());
  request.scattered = shards != nullptr || in_pieces;
  request.shards = std::move(shards);
  return request;
}

void push(const Common& common, Call call) {
  call.turn_of = common.turn_of;
  call.key = common.key;
  common.bridge.push(common.runtime, common.name, common.operation.priority, std::move(call));
}

// Pushes an operation of one request.
void push(const Common& common, Request request, std::vector<Handle> inputs, std::vector<Handle> outputs,
          std::function<void(Request&, const std::vector<void*>& in, const std::vector<void*>& out)> set_memory) {
  Call call;
  call.requests.push_back(std::move(request));
  call.inputs = std::move(inputs);
  call.outputs = std::move(outputs);
  call.set_memory = [set_memory = std::move(set_memory)](std::vector<Request>& requests, const std::vector<void*>& in,
                                                         const std::vector<void*>& out) {
    set_memory(requests[0], in, out);
  };
  push(common, std::move(call));
}

void set_whole_memory(Request& request, const std::vector<void*>& in, const std::vector<void*>& out) {
  request.inputs.assign(in.begin(), in.end());
  request.outputs = out;
}

size_t sum(const std::vector<size_t>& numbers) { return std::accumulate(numbers.begin(), numbers.end(), size_t{0}); }

// A shard of rows[r] rows for each rank r.
std::shared_ptr<const std::vector<Shard>> shards_of_rows(const std::vector<size_t>& rows, size_t row_elements) {
  auto shards = std::make_shared<std::vector<Shard>>();
  size_t begin = 0;
  for (size_t r = 0; r < rows.size(); ++r) {
    shards->push_back({begin, rows[r] * row_elements, static_cast<int32_t>(r)});
    begin += shards->back().count;
  }
  return shards;
}

// Arrays of one dtype, concatenated to one operation, and the operation's division into shards.
struct Shards {
  Shards(const Common& common, const std::vector<Handle>& arrays, const std::vector<ArrayShard>& division);
  DType dtype = DType::float32;
  std::vector<size_t> begins;  // where each array begins in the operation
  std::vector<size_t> counts;
  size_t count = 0;
  std::string text;
  Devices devices;
  std::shared_ptr<const std::vector<Shard>> shards;
  std::vector<Shard> own;
};

Shards::Shards(const Common& common, const std::vector<Handle>& arrays, const std::vector<ArrayShard>& division) {
  if (arrays.empty()) throw Error("no array was given");
  for (const Handle array : arrays) {
    const Description d = describe(common.bridge.api(), array);
    if (!begins.empty() && d.dtype != dtype) {
      throw Error(std::string("the arrays of one call differ in dtype: ") + dtype_name(dtype) + " and " + d.text() +
                  ". Make a call for each dtype");
    }
    dtype = d.dtype;
    devices.all_on(d);
    begins.push_back(count);
    counts.push_back(d.count());
    count += d.count();
    text += (text.empty() ? "" : ", ") + shape_text(d.shape);
  }
  auto made = std::make_shared<std::vector<Shard>>();
  size_t end = 0;
  const World& world = common.runtime->world();
  for (const ArrayShard& one : division) {
    if (one.array >= arrays.size() || one.root < 0 || one.root >= world.size() || one.begin > counts[one.array] ||
        one.count > counts[one.array] - one.begin || begins[one.array] + one.begin != end) {
      throw Error("shards must cover all elements of the arrays in order, and their owners must be ranks");
    }
    made->push_back({end, one.count, one.root});
    if (one.root == world.rank()) own.push_back(made->back());
    end += one.count;
  }
  if (end != count) throw Error("shards must cover all elements of the arrays");
  shards = std::move(made);
}

// The name of rank s's broadcast in an alltoall.
std::string name_of_sender(const Common& common, size_t s) {
  const int label = common.runtime->world().label(static_cast<int>(s));
  return "what rank " + std::to_string(label) + " sends in " + common.name;
}

// One broadcast from each rank that has something to send, all at the same time. rows[s]: rows that rank s sends;
// take[s]: how many of these rows this rank keeps; skip[s]: how many rows precede the kept rows.
void push_broadcasts(const Common& common, Handle input, Handle output, const Devices& devices, size_t row_elements,
                     const std::vector<size_t>& rows, const std::vector<size_t>& take,
                     const std::vector<size_t>& skip) {
  const auto me = static_cast<size_t>(common.runtime->world().rank());
  struct Window {  // of one broadcast: the elements that this rank keeps, and their position in the output (bytes)
    size_t begin;
    size_t count;
    size_t offset;
    bool sends;
  };
  Call call;
  std::vector<Window> windows;
  size_t written = 0;
  for (size_t s = 0; s < rows.size(); ++s) {
    const size_t kept = take[s] * row_elements;
    Operation operation = common.operation;
    operation.kind = Kind::broadcast;
    operation.has_concurrent_roots = true;
    operation.root = static_cast<int32_t>(s);
    operation.count = rows[s] * row_elements;
    if (operation.count > 0) {
      call.requests.push_back(request_for(common, name_of_sender(common, s), operation, shape_text({operation.count}),
                                          devices, nullptr, true));
      windows.push_back({skip[s] * row_elements, kept, written, s == me});
    }
    written += kept * item_size(operation.dtype);
  }
  call.inputs = {input};
  call.outputs = {output};
  call.set_memory = [windows](std::vector<Request>& requests, const std::vector<void*>& in,
                              const std::vector<void*>& out) {
    for (size_t i = 0; i < requests.size(); ++i) {
      const Window& window = windows[i];
      if (window.sends) requests[i].sources.push_back({0, requests[i].operation.count, in[0]});
      if (window.count > 0) {
        requests[i].targets.push_back({window.begin, window.count, static_cast<char*>(out[0]) + window.offset});
      }
    }
  };
  push(common, std::move(call));
}

// Whether the exchange is one NCCL operation from each rank to each rank. All ranks make the same choice: they have
// agreed on the locations of their arrays, and all ranks can use NCCL or none.
bool goes_as_one(const Common& common, const Devices& devices) {
  const std::shared_ptr<const DeviceMemory> memory = devices.memory();
  Operation operation = common.operation;
  operation.kind = Kind::alltoall;
  return memory && common.runtime->gpus().road_of(operation, *memory, true) == DataPath::nccl;
}

// rows[s][r]: rows from rank s to rank r. Each pair of sender and receiver is a shard.
void push_exchange(const Common& common, Handle input, Handle output, const Devices& devices, size_t row_elements,
                   const std::vector<std::vector<size_t>>& rows) {
  const auto me = static_cast<size_t>(common.runtime->world().rank());
  auto shards = std::make_shared<std::vector<Shard>>();
  size_t end = 0;
  for (size_t s = 0; s < rows.size(); ++s) {
    for (const size_t some : rows[s]) {
      shards->push_back({end, some * row_elements, static_cast<int32_t>(s)});
      end += some * row_elements;
    }
  }
  Operation operation = common.operation;
  operation.kind = Kind::alltoall;
  operation.set_arrays(operation.dtype, end);
  if (end == 0) {  // takes the turn without a request
    Call call;
    call.inputs = {input};
    call.outputs = {output};
    push(common, std::move(call));
    return;
  }
  push(common, request_for(common, common.name, operation, "rows", devices, shards), {input}, {output},
       [shards, me, width = item_size(operation.dtype), size = rows.size()](
           Request& request, const std::vector<void*>& in, const std::vector<void*>& out) {
         const char* sent = static_cast<const char*>(in[0]);
         char* received = static_cast<char*>(out[0]);
         for (size_t r = 0; r < size; ++r) {
           const Shard& to = (*shards)[me * size + r];
           const Shard& from = (*shards)[r * size + me];
           request.sources.push_back({to.begin, to.count, sent});
           request.targets.push_back({from.begin, from.count, received});
           sent += to.count * width;
           received += from.count * width;
         }
       });
}

// Whether an array of a group needs its own request. It does between hosts if the compressor sends a fixed number of
// elements, since this number is meant for each array.
bool must_be_apart(const Common& common, DType dtype, size_t count) {
  Operation operation = common.operation;
  operation.set_arrays(dtype, count);
  return operation.compressor != nullptr && operation.compressor->counts_elements() &&
         common.runtime->world().has_several_hosts();
}

// The contents of one request of a group: all arrays of one dtype on one device, one after another; or one array that
// must be apart.
struct DtypeGroup {
  DType dtype;
  int gpu;
  bool apart;
  Devices devices;
  std::vector<size_t> members;
  std::vector<Target> spans;
  size_t count = 0;

  // Suffix that distinguishes the request's name from that of the group's first request.
  std::string suffix() const {
    return apart ? ", array " + std::to_string(members[0] + 1) : ", the " + std::string(dtype_name(dtype));
  }
};

}  // namespace

void push_allreduce(const Common& common, const std::vector<Handle>& inputs, const std::vector<Handle>& outputs) {
  if (inputs.empty()) throw Error("no array was given");
  const Api& api = common.bridge.api();
  const Description first = describe(api, inputs[0]);
  Devices devices;
  // Usually the only output is the input, which need not be described again.
  const auto is_first = [&](Handle array) { return array == inputs[0]; };
  for (Handle array : inputs) devices.read(is_first(array) ? first : require_same(first, describe(api, array)));
  for (Handle array : outputs) devices.written(is_first(array) ? first : require_same(first, describe(api, array)));
  Operation operation = common.operation;
  operation.set_arrays(first.dtype, first.count());
  push(common, request_for(common, common.name, operation, shape_text(first.shape), devices), inputs, outputs,
       set_whole_memory);
}

void push_broadcast(const Common& common, Handle input, const std::vector<Handle>& outputs) {
  const Api& api = common.bridge.api();
  const Description first = describe(api, input);
  const bool sends = common.operation.root == common.runtime->world().rank();
  Devices devices;
  if (sends) devices.read(first);
  if (!sends && outputs.empty() && first.gpu >= 0) throw Error("a broadcast between GPUs needs an output array");
  for (Handle array : outputs) devices.written(require_same(first, describe(api, array)));
  Operation operation = common.operation;
  operation.set_arrays(first.dtype, first.count());
  // Only the root's value is sent; other ranks only check the shape and dtype of their input.
  push(common, request_for(common, common.name, operation, shape_text(first.shape), devices),
       sends ? std::vector<Handle>{input} : std::vector<Handle>(), outputs, set_whole_memory);
}

void push_group(const Common& common, const std::vector<Handle>& inputs, const std::vector<Handle>& outputs) {
  require_pairs(inputs, outputs);
  const Api& api = common.bridge.api();
  std::vector<DtypeGroup> groups;
  std::vector<int> gpus;
  std::string shapes;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Description description = describe(api, inputs[i]);
    const Description output = require_same(description, describe(api, outputs[i]));
    if (output.gpu != description.gpu) throw different_devices("an input and its output", description.gpu, output.gpu);
    shapes += (i > 0 ? ", " : "") + description.text();
    const size_t count = description.count();
    const bool apart = must_be_apart(common, description.dtype, count);
    auto group = std::find_if(groups.begin(), groups.end(), [&](const DtypeGroup& g) {
      return !apart && !g.apart && g.dtype == description.dtype && g.gpu == description.gpu;
    });
    if (group == groups.end()) group = groups.insert(group, {description.dtype, description.gpu, apart, {}, {}, {}, 0});
    if (std::find(gpus.begin(), gpus.end(), description.gpu) == gpus.end()) gpus.push_back(description.gpu);
    group->devices.all_on(description);
    group->members.push_back(i);
    group->spans.push_back({group->count, count, nullptr});
    group->count += count;
  }
  const std::string text = "a group of " + std::to_string(inputs.size()) + ": " + shapes;
  Call call;
  call.chained = true;
  for (const DtypeGroup& group : groups) {
    Operation operation = common.operation;
    operation.set_arrays(group.dtype, group.count);
    // All names begin with the group's name, so that forget() drops them.
    std::string name = common.name + (call.requests.empty() ? "" : group.suffix());
    // Other ranks may have other device numbers, so the name has the position of the device, not its number.
    const auto position = std::find(gpus.begin(), gpus.end(), group.gpu) - gpus.begin();
    if (position > 0) name += ", device " + std::to_string(position + 1);
    call.requests.push_back(request_for(common, name, operation, text, group.devices, nullptr, true));
  }
  call.inputs = inputs;
  call.outputs = outputs;
  call.set_memory = [groups](std::vector<Request>& requests, const std::vector<void*>& in,
                             const std::vector<void*>& out) {
    for (size_t g = 0; g < groups.size(); ++g) {
      const DtypeGroup& group = groups[g];
      for (size_t m = 0; m < group.members.size(); ++m) {
        const Target& span = group.spans[m];
        requests[g].sources.push_back({span.begin, span.count, in[group.members[m]]});
        requests[g].targets.push_back({span.begin, span.count, out[group.members[m]]});
      }
    }
  };
  push(common, std::move(call));
}

void push_allgather(const Common& common, Handle input, Handle output, const std::vector<size_t>& rows) {
  const auto me = static_cast<size_t>(common.runtime->world().rank());
  if (rows.size() != static_cast<size_t>(common.runtime->world().size()))
    throw Error("rows must have one number per rank");
  Devices devices;
  const Description d = describe_rows(common.bridge.api(), input, output, rows[me], sum(rows), &devices);
  Operation operation = common.operation;
  operation.kind = Kind::broadcast;
  operation.set_arrays(d.dtype, sum(rows) * d.row_elements());
  const auto shards = shards_of_rows(rows, d.row_elements());
  const Shard own = (*shards)[me];
  push(common, request_for(common, common.name, operation, "rows", devices, shards), {input}, {output},
       [own](Request& request, const std::vector<void*>& in, const std::vector<void*>& out) {
         request.sources.push_back({own.begin, own.count, in[0]});
         request.targets.push_back({0, request.operation.count, out[0]});
       });
}

void push_alltoall(const Common& common, Handle input, Handle output, const std::vector<std::vector<size_t>>& rows) {
  const auto me = static_cast<size_t>(common.runtime->world().rank());
  const auto size = static_cast<size_t>(common.runtime->world().size());
  if (rows.size() != size) throw Error("rows must have one list per rank");
  std::vector<size_t> sent, take, skip;
  for (const std::vector<size_t>& row : rows) {
    if (row.size() != size) throw Error("each list of rows must have one number per rank");
    sent.push_back(sum(row));
    take.push_back(row[me]);
    skip.push_back(std::accumulate(row.begin(), row.begin() + static_cast<std::ptrdiff_t>(me), size_t{0}));
  }
  Devices devices;
  const Description d = describe_rows(common.bridge.api(), input, output, sent[me], sum(take), &devices);
  Common typed = common;
  typed.operation.dtype = d.dtype;
  if (goes_as_one(common, devices)) {
    push_exchange(typed, input, output, devices, d.row_elements(), rows);
  } else {
    push_broadcasts(typed, input, output, devices, d.row_elements(), sent, take, skip);
  }
}

void refuse_alltoall(const Common& common, Handle input, const std::vector<std::vector<size_t>>& rows,
                     const std::string& reason) {
  const Description d = describe(common.bridge.api(), input);
  Devices devices;
  devices.all_on(d);
  std::vector<std::string> names;
  if (goes_as_one(common, devices)) {
    names.push_back(common.name);
  } else {
    for (size_t s = 0; s < rows.size(); ++s) {
      if (sum(rows[s]) * d.row_elements() > 0) names.push_back(name_of_sender(common, s));
    }
  }
  const uint64_t turn = common.runtime->take_turn(common.name);
  for (std::string& name : names) common.runtime->refuse(std::move(name), turn, reason);
}

void push_reducescatter(const Common& common, Handle input, Handle output) {
  const auto me = static_cast<size_t>(common.runtime->world().rank());
  const auto size = static_cast<size_t>(common.runtime->world().size());
  const Description whole = describe(common.bridge.api(), input);
  if (whole.shape.empty()) throw Error("a scalar has no rows");
  std::vector<size_t> rows(size, whole.shape[0] / size);
  for (size_t r = 0; r < whole.shape[0] % size; ++r) ++rows[r];
  Devices devices;
  const Description d = describe_rows(common.bridge.api(), input, output, whole.shape[0], rows[me], &devices);
  Operation operation = common.operation;
  operation.kind = Kind::reduce;
  operation.set_arrays(d.dtype, d.count());
  const auto shards = shards_of_rows(rows, d.row_elements());
  const Shard own = (*shards)[me];
  push(common, request_for(common, common.name, operation, "rows, " + shape_text(d.shape), devices, shards), {input},
       {output}, [own](Request& request, const std::vector<void*>& in, const std::vector<void*>& out) {
         request.sources.push_back({0, request.operation.count, in[0]});
         request.targets.push_back({own.begin, own.count, out[0]});
       });
}

void push_reduce_to_owners(const Common& common, const std::vector<Handle>& arrays,
                           const std::vector<ArrayShard>& division, const std::vector<Handle>& own,
                           const std::vector<Handle>& next) {
  Shards all(common, arrays, division);
  if (own.size() != all.own.size()) {
    throw Error("this rank owns " + std::to_string(all.own.size()) + " shards, but got " + std::to_string(own.size()) +
                " arrays for them");
  }
  for (size_t i = 0; i < own.size(); ++i) {
    const Description d = describe(common.bridge.api(), own[i]);
    if (d.dtype != all.dtype || d.count() != all.own[i].count)
      throw Error("the array for " + std::to_string(all.own[i].count) + " elements is " + d.text());
    all.devices.all_on(d);
  }
  Operation operation = common.operation;
  operation.kind = Kind::reduce;
  operation.set_arrays(all.dtype, all.count);
  std::vector<Handle> outputs = own;
  outputs.insert(outputs.end(), next.begin(), next.end());
  push(common, request_for(common, common.name, operation, all.text, all.devices, all.shards), arrays, outputs,
       [all](Request& request, const std::vector<void*>& in, const std::vector<void*>& out) {
         for (size_t i = 0; i < in.size(); ++i) request.sources.push_back({all.begins[i], all.counts[i], in[i]});
         for (size_t i = 0; i < all.own.size(); ++i)
           request.targets.push_back({all.own[i].begin, all.own[i].count, out[i]});
       });
}

void push_gather_from_owners(const Common& common, const std::vector<Handle>& arrays,
                             const std::vector<ArrayShard>& division, const std::vector<Handle>& fenced) {
  const Shards all(common, arrays, division);
  Operation operation = common.operation;
  operation.kind = Kind::broadcast;
  operation.set_arrays(all.dtype, all.count);
  push(common, request_for(common, common.name, operation, all.text, all.devices, all.shards), fenced, arrays,
       [all, division, me = common.runtime->world().rank()](Request& request, const std::vector<void*>&,
                                                            const std::vector<void*>& data_of) {
         const size_t width = item_size(all.dtype);
         for (size_t i = 0; i < division.size(); ++i) {
           const Shard& shard = (*all.shards)[i];
           char* data = static_cast<char*>(data_of[division[i].array]) + division[i].begin * width;
           if (shard.root == me) {
             request.sources.push_back({shard.begin, shard.count, data});
           } else {
             request.targets.push_back({shard.begin, shard.count, data});
           }
         }
       });
}

}  // namespace mykv::mxnet
