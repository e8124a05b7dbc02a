// The life of a part whose arrays lie on GPUs, where it differs from parts.cpp. A stream of the runtime copies the part
// into its slot; then the part arrives in the host's table. At the end a stream copies the result out. The thread polls
// the GPUs and never blocks on them.
#include "runtime/device_parts.h"

#include <mutex>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "base/keep_forever.h"
#include "kernels/kernels.h"
#include "operations/ranges.h"
#include "operations/signature.h"
#include "runtime/runtime.h"

namespace mykv {

namespace {

constexpr auto kSettlePatience = std::chrono::seconds(2);  // for copies under way when this rank breaks down
constexpr auto kSettleLook = std::chrono::microseconds(200);

// The index of a place in its vector.
template <class Place>
size_t index_of(const std::vector<Place>& places, const Place& place) {
  return static_cast<size_t>(&place - places.data());
}

// Throws Error unless all addresses of a request lie on the GPUs that it names. If a wrong address were found only when
// the result is copied out, the error could not reach all ranks any more.
void require_on_devices(const Request& request) {
  const DeviceMemory& devices = *request.devices;
  const auto require = [](const void* address, size_t count, const std::vector<int>& of, size_t index) {
    if (count > 0) gpu::require_on_device(address, of.at(index));
  };
  const size_t count = request.operation.count;
  for (size_t i = 0; i < request.inputs.size(); ++i) require(request.inputs[i], count, devices.inputs, i);
  for (size_t i = 0; i < request.outputs.size(); ++i) require(request.outputs[i], count, devices.outputs, i);
  for (size_t i = 0; i < request.sources.size(); ++i)
    require(request.sources[i].data, request.sources[i].count, devices.inputs, i);
  for (size_t i = 0; i < request.targets.size(); ++i)
    require(request.targets[i].data, request.targets[i].count, devices.outputs, i);
}

}  // namespace

// Whether the memory of a request is not ready yet. Until then the request takes no slot and blocks no stream, so that
// later requests can overtake it.
bool Runtime::awaits_device(RequestState& posted) {
  const auto& after = posted.request.devices->after;
  try {
    while (posted.happened < after.size()) {
      if (!after[posted.happened]->happened()) return true;
      ++posted.happened;
    }
  } catch (const Error& error) {
    posted.happened = after.size();
    posted.request.refusal = error.what();
  }
  return false;
}

void Runtime::begin_copy_in(Part part, const Operation& operation) {
  Copying copying;
  part.staged = true;
  if (part.posted->recorded) part.copied_in = now_ns();
  copying.part = std::move(part);
  copying.operation = operation;
  size_t slots = 0;
  try {
    if (copying.part.number == 0) require_on_devices(copying.part.posted->request);
    copy_from_devices(copying);
    copying.copies = staged_->streams_in.begun();
  } catch (const Error& error) {
    copying.error = error.cause();
    try {
      copying.copies = staged_->streams_in.begun();  // the copies that did begin
    } catch (const Error&) {
      staged_->streams_in.forget();
      copying.lost = true;
    }
  }
  slots = (copying.part.slot_bytes > 0) + copying.inputs.size();
  std::lock_guard<std::mutex> lock(mutex_);
  ++copying.part.posted->under_way;
  staged_bytes_ += slots * copying.part.slot_bytes;
  staged_->in.push_back(std::move(copying));
  if (!staged_->slots.problem().empty() && !gpu_told_) {
    gpu_told_ = true;
    gpu_note_ = "copies to and from GPUs hold up its thread, since " + staged_->slots.problem();
  }
}

void Runtime::copy_from_devices(Copying& copying) {
  Part& part = copying.part;
  const Operation& op = copying.operation;
  const Request& request = part.posted->request;
  char* const base = world_.segment().base();
  const size_t bytes = std::max<size_t>(op.bytes(), 1);
  part.slot = staged_->slots.allocate(bytes);
  part.slot_bytes = bytes;
  if (op.kind == Kind::broadcast && op.root != world_.rank()) return;
  const size_t width = item_size(op.dtype);
  const std::vector<int>& devices = request.devices->inputs;
  gpu::CopyStreams& streams = staged_->streams_in;
  if (request.scattered) {
    for_overlaps(request.sources, range_of(part), [&](const Source& from, const Range& both) {
      streams.copy(devices.at(index_of(request.sources, from)), base + part.slot + (both.begin - part.begin) * width,
                   static_cast<const char*>(from.data) + (both.begin - from.begin) * width, both.count() * width);
    });
    return;
  }
  const size_t inputs = op.kind == Kind::broadcast ? 1 : request.inputs.size();
  for (size_t i = 0; i < inputs; ++i) {
    uint64_t slot = part.slot;
    if (i > 0) {
      slot = staged_->slots.allocate(bytes);
      copying.inputs.push_back(slot);
    }
    streams.copy(devices.at(i), base + slot, static_cast<const char*>(request.inputs[i]) + part.begin * width,
                 op.bytes());
  }
}

// Parts whose copies in are finished arrive in the host's table.
bool Runtime::take_copied_in() {
  bool any = false;
  std::vector<int> late;
  for (auto it = staged_->in.begin(); it != staged_->in.end();) {
    Copying& copying = *it;
    try {
      if (!copying.copies.happened(&late)) {
        ++it;
        continue;
      }
    } catch (const Error& error) {
      copying.copies = {};
      copying.lost = true;
      if (copying.error.empty()) copying.error = error.cause();
    }
    join_inputs(copying);
    if (!meet(copying.part, copying.operation, copying.error.text, false)) {  // the table is full
      set_crowded_out(copying.part.posted.get());
      ++it;
      continue;
    }
    set_crowded_out(nullptr);
    it = staged_->in.erase(it);
    any = true;
  }
  return any;
}

// Reduces several inputs to one share, and releases the slots that are not needed any more.
void Runtime::join_inputs(Copying& copying) {
  Part& part = copying.part;
  const Operation& op = copying.operation;
  char* const base = world_.segment().base();
  size_t given_back = copying.inputs.size();
  if (copying.error.empty() && !copying.inputs.empty()) {
    std::vector<const void*> inputs{base + part.slot};
    for (const uint64_t slot : copying.inputs) inputs.push_back(base + slot);
    void* output = base + part.slot;
    reduce(op.dtype, op.reduce_op, inputs.data(), static_cast<int>(inputs.size()), &output, 1, part.count, 1.0);
  }
  staged_->unsafe |= copying.lost;
  if (!copying.lost) {
    for (const uint64_t slot : copying.inputs) staged_->slots.release(slot, part.slot_bytes);
  }
  copying.inputs.clear();
  const bool drop = !copying.error.empty() && part.slot_bytes > 0;
  if (drop && !copying.lost) staged_->slots.release(part.slot, part.slot_bytes);
  given_back += drop;
  if (given_back > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    staged_bytes_ -= given_back * part.slot_bytes;
  }
  if (drop) part.slot_bytes = 0;
}

// Called when the result lies in the slots of all ranks.
void Runtime::begin_copy_out(const Part& part) {
  staged_->out.push_back({});
  Copying& copying = staged_->out.back();
  copying.part = part;
  copying.begun = part.posted->recorded ? now_ns() : 0;
  gpu::CopyStreams& streams = staged_->streams_out;
  try {
    copy_to_devices(part);
    copying.copies = streams.begun();
  } catch (const Error& error) {
    copying.lost = true;
    try {
      copying.copies = streams.begun();  // the copies that did begin
      copying.lost = false;
    } catch (const Error&) {
      streams.forget();
    }
    retire(error.what());
    copying.error = retired_text(part);
  }
}

void Runtime::copy_to_devices(const Part& part) {
  const Request& request = part.posted->request;
  const size_t width = item_size(request.operation.dtype);
  const std::vector<int>& devices = request.devices->outputs;
  const char* const slot = world_.segment().base() + part.slot;
  gpu::CopyStreams& streams = staged_->streams_out;
  for_overlaps(request.targets, range_of(part), [&](const Target& to, const Range& both) {
    streams.copy(devices.at(index_of(request.targets, to)),
                 static_cast<char*>(to.data) + (both.begin - to.begin) * width,
                 slot + (both.begin - part.begin) * width, both.count() * width);
  });
  for (size_t i = 0; i < request.outputs.size(); ++i) {
    streams.copy(devices.at(i), static_cast<char*>(request.outputs[i]) + part.begin * width, slot, part.count * width);
  }
}

bool Runtime::take_copied_out() {
  bool any = false;
  std::vector<int> late;
  for (auto it = staged_->out.begin(); it != staged_->out.end();) {
    try {
      if (!it->copies.happened(&late)) {
        ++it;
        continue;
      }
    } catch (const Error& error) {
      it->lost = true;
      retire(error.what());
      it->error = retired_text(it->part);
    }
    Copying copying = std::move(*it);
    it = staged_->out.erase(it);
    any = true;
    if (copying.lost) abandon(copying);
    const PartRecord::Interval interval{copying.begun, copying.begun == 0 ? 0 : now_ns()};
    end_part(copying.part, copying.error, interval);
  }
  return any;
}

// A GPU of this rank did not get a result that the other ranks have. This rank would continue with different values, so
// it leaves, after it has done its share of the operations that all ranks have agreed on.
void Runtime::retire(const std::string& failure) {
  const int rank = world_.label(world_.rank());
  if (!retired_.empty()) return;
  retired_ = failure + " of rank " + std::to_string(rank);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopped_.empty()) stopped_ = retired_;
  }
  table_.depart(rank, retired_);
}

std::string Runtime::retired_text(const Part& part) const {
  return shown_name(part.posted->request.name) + ": " + retired_;
}

// The slot and the owner of the request's memory are never released, since the GPU may still use them.
void Runtime::abandon(Copying& copying) {
  staged_->unsafe = true;
  keep_for_good(copying.part.posted);
  std::lock_guard<std::mutex> lock(mutex_);
  staged_bytes_ -= copying.part.slot_bytes;
  copying.part.slot_bytes = 0;
}

// At the end: waits up to kSettlePatience for copies under way, since a caller may free its memory as soon as it hears
// that its operation has failed. A result that has reached its GPUs counts as a result, as on the other ranks.
void Runtime::settle_copies() {
  const Clock::time_point until = Clock::now() + kSettlePatience;
  for (std::list<Copying>* const copies : {&staged_->in, &staged_->out}) {
    for (Copying& copying : *copies) {
      try {
        std::vector<int> late;
        while (!copying.lost && !copying.copies.happened(&late)) {
          late.clear();
          copying.lost = Clock::now() > until;
          std::this_thread::sleep_for(kSettleLook);
        }
      } catch (const std::exception&) {
        copying.lost = true;
      }
    }
  }
  for (auto it = staged_->out.begin(); it != staged_->out.end();) {
    if (it->lost || !it->error.empty()) {
      ++it;
      continue;
    }
    const Copying copying = std::move(*it);
    it = staged_->out.erase(it);
    try {
      end_part(copying.part, {}, {copying.begun, copying.begun == 0 ? 0 : now_ns()});
    } catch (const Error&) {
      // The table was given up later; the result is still valid.
    }
  }
}

void Runtime::drop_copies() {
  for (std::list<Copying>* const copies : {&staged_->in, &staged_->out}) {
    for (Copying& copying : *copies) {
      std::vector<int> late;
      try {
        copying.lost = copying.lost || !copying.copies.happened(&late);
      } catch (const Error&) {
        copying.lost = true;
      }
      if (copying.lost) abandon(copying);
    }
    copies->clear();
  }
}

std::string Runtime::take_gpu_note() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(gpu_note_, {});
}

}  // namespace mykv
