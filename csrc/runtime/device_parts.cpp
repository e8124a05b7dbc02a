#include "runtime/device_parts.h"

#include <chrono>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/forks.h"
#include "kernels/kernels.h"
#include "operations/request.h"
#include "operations/signature.h"

namespace mykv {

namespace {

// How long a rank that breaks down waits for copies under way.
constexpr auto kSettlePatience = std::chrono::seconds(2);
constexpr auto kSettleLook = std::chrono::microseconds(200);

// The index of an element in its vector.
template <class Element>
size_t index_of(const std::vector<Element>& elements, const Element& element) {
  return static_cast<size_t>(&element - elements.data());
}

// Tracks the copies that were begun. False if that fails: the end of the copies then stays unknown.
bool track(gpu::CopyStreams& streams, gpu::Copies* copies) {
  try {
    *copies = streams.begun();
    return true;
  } catch (const Error&) {
    streams.forget();
    return false;
  }
}

// Throws Error unless all addresses of a request are on the GPUs that it names. If a wrong address were found only when
// the result is copied out, it would be too late to give all ranks the error.
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

bool DeviceParts::awaits_device(RequestState& posted) {
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

void DeviceParts::begin(Part part) {
  Copying copying;
  part.staged = true;
  if (part.posted->recorded) part.copied_in = now_ns();
  copying.operation = Parts::operation_of(part);
  copying.part = std::move(part);
  try {
    if (copying.part.number == 0) require_on_devices(copying.part.posted->request);
    copy_in(copying);
    copying.copies = streams_in_.begun();
  } catch (const Error& error) {
    copying.error = error.failure();
    copying.lost = !track(streams_in_, &copying.copies);  // the copies that did begin
  }
  requests_.take_slots(copying.part, (copying.part.slot_bytes > 0) + copying.inputs.size());
  in_.push_back(std::move(copying));
  note_problem();
}

// Reports once that slots are not pinned.
void DeviceParts::note_problem() {
  const std::string& problem = pinned_.problem();
  if (problem.empty() || std::exchange(told_, true)) return;
  std::lock_guard<std::mutex> lock(note_mutex_);
  note_ = "copies to and from GPUs block its thread, since " + problem;
}

void DeviceParts::copy_in(Copying& copying) {
  Part& part = copying.part;
  const Operation& op = copying.operation;
  const Request& request = part.posted->request;
  char* const base = world_.segment().base();
  const size_t bytes = std::max<size_t>(op.bytes(), 1);
  part.slot = pinned_.allocate(bytes);
  part.slot_bytes = bytes;
  if (op.kind == Kind::broadcast && op.root != world_.rank()) return;
  const size_t width = item_size(op.dtype);
  const std::vector<int>& devices = request.devices->inputs;
  gpu::CopyStreams& streams = streams_in_;
  if (request.scattered) {
    for_overlaps(request.sources, range_of(part), [&](const Source& from, const Range& both) {
      streams.copy(devices.at(index_of(request.sources, from)), base + part.slot + (both.begin - part.begin) * width,
                   address_in(from, both.begin, width), both.count() * width);
    });
    return;
  }
  const size_t inputs = op.kind == Kind::broadcast ? 1 : request.inputs.size();
  for (size_t i = 0; i < inputs; ++i) {
    uint64_t slot = part.slot;
    if (i > 0) {
      slot = pinned_.allocate(bytes);
      copying.inputs.push_back(slot);
    }
    streams.copy(devices.at(i), base + slot, static_cast<const char*>(request.inputs[i]) + part.begin * width,
                 op.bytes());
  }
}

bool DeviceParts::progress() {
  if (!copying()) return false;
  const bool any = take_copied_in();
  return take_copied_out() || any;
}

// The parts of a request arrive in their order, even if their copies end in a different order. Otherwise hosts with
// full tables would hold different parts of the request that is due, and wait for each other.
bool DeviceParts::take_copied_in() {
  bool any = false;
  std::vector<int> late;
  ++pass_;
  for (auto it = in_.begin(); it != in_.end();) {
    Copying& copying = *it;
    RequestState& posted = *copying.part.posted;
    if (posted.held_in_pass == pass_) {
      ++it;
      continue;
    }
    try {
      if (!copying.copies.happened(&late)) {
        posted.held_in_pass = pass_;
        ++it;
        continue;
      }
    } catch (const Error& error) {
      copying.copies = {};
      copying.lost = true;
      if (copying.error.empty()) copying.error = error.failure();
    }
    join_inputs(copying);
    const Parts::Arrived arrived = parts_.arrive(copying.part, copying.operation, copying.error.text, false);
    if (arrived == Parts::Arrived::table_full) {
      requests_.set_crowded_out(&posted);
      posted.held_in_pass = pass_;
      ++it;
      continue;
    }
    if (arrived == Parts::Arrived::over) copy_out_and_leave(copying.part, table_.entry(copying.part.entry).error.get());
    requests_.set_crowded_out(nullptr);
    it = in_.erase(it);
    any = true;
  }
  return any;
}

// Reduces several inputs to one share, and releases the slots that are no longer needed.
void DeviceParts::join_inputs(Copying& copying) {
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
  unsafe_ |= copying.lost;
  if (!copying.lost) {
    for (const uint64_t slot : copying.inputs) pinned_.release(slot, part.slot_bytes);
  }
  copying.inputs.clear();
  const bool drop = !copying.error.empty() && part.slot_bytes > 0;
  if (drop && !copying.lost) pinned_.release(part.slot, part.slot_bytes);
  given_back += drop;
  if (given_back > 0) requests_.release_bytes(given_back * part.slot_bytes);
  if (drop) part.slot_bytes = 0;
}

void DeviceParts::copy_out_and_leave(const Part& part, const Failure& error) {
  if (!error.empty()) {
    parts_.copy_out_and_leave(part, error);
  } else if (retired_.empty()) {
    begin_copy_out(part);
  } else {
    parts_.leave_entry(part, retired_text(part), {});
  }
}

// Called when the result is in the slots of all ranks.
void DeviceParts::begin_copy_out(const Part& part) {
  out_.push_back({});
  Copying& copying = out_.back();
  copying.part = part;
  copying.begun = part.posted->recorded ? now_ns() : 0;
  gpu::CopyStreams& streams = streams_out_;
  try {
    copy_out(part);
    copying.copies = streams.begun();
  } catch (const Error& error) {
    copying.lost = !track(streams, &copying.copies);  // the copies that did begin
    retire(error.what());
    copying.error = retired_text(part);
  }
}

void DeviceParts::copy_out(const Part& part) {
  const Request& request = part.posted->request;
  const size_t width = item_size(request.operation.dtype);
  const std::vector<int>& devices = request.devices->outputs;
  const char* const slot = world_.segment().base() + part.slot;
  gpu::CopyStreams& streams = streams_out_;
  for_overlaps(request.targets, range_of(part), [&](const Target& to, const Range& both) {
    streams.copy(devices.at(index_of(request.targets, to)), address_in(to, both.begin, width),
                 slot + (both.begin - part.begin) * width, both.count() * width);
  });
  for (size_t i = 0; i < request.outputs.size(); ++i) {
    streams.copy(devices.at(i), static_cast<char*>(request.outputs[i]) + part.begin * width, slot, part.count * width);
  }
}

bool DeviceParts::take_copied_out() {
  bool any = false;
  std::vector<int> late;
  for (auto it = out_.begin(); it != out_.end();) {
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
    it = out_.erase(it);
    any = true;
    if (copying.lost) keep_memory(copying);
    const PartRecord::Interval interval{copying.begun, copying.begun == 0 ? 0 : now_ns()};
    parts_.leave_entry(copying.part, copying.error, interval);
  }
  return any;
}

// A GPU of this rank did not get a result that the other ranks have. This rank would continue with different values, so
// it leaves, after it has done its share of the operations that all ranks have agreed on.
void DeviceParts::retire(const std::string& failure) {
  if (!retired_.empty()) return;
  retired_ = failure + " of rank " + std::to_string(world_.label(world_.rank()));
  requests_.refuse_new(retired_);
  table_.depart(world_.label(world_.rank()), retired_);
}

std::string DeviceParts::retired_text(const Part& part) const {
  return shown_name(part.posted->request.name) + ": " + retired_;
}

// The slot and the owner of the request's memory are never released, since the GPU may still use them.
void DeviceParts::keep_memory(Copying& copying) {
  unsafe_ = true;
  keep_forever(copying.part.posted);
  requests_.release_bytes(copying.part.slot_bytes);
  copying.part.slot_bytes = 0;
}

void DeviceParts::wait_for_copies() {
  const auto until = std::chrono::steady_clock::now() + kSettlePatience;
  for (std::list<Copying>* const copies : {&in_, &out_}) {
    for (Copying& copying : *copies) {
      try {
        std::vector<int> late;
        while (!copying.lost && !copying.copies.happened(&late)) {
          late.clear();
          copying.lost = std::chrono::steady_clock::now() > until;
          std::this_thread::sleep_for(kSettleLook);
        }
      } catch (const std::exception&) {
        copying.lost = true;
      }
    }
  }
  for (auto it = out_.begin(); it != out_.end();) {
    if (it->lost || !it->error.empty()) {
      ++it;
      continue;
    }
    const Copying copying = std::move(*it);
    it = out_.erase(it);
    try {
      parts_.leave_entry(copying.part, {}, {copying.begun, copying.begun == 0 ? 0 : now_ns()});
    } catch (const Error&) {
      // The verdict on the table came later; the result is still valid.
    }
  }
}

void DeviceParts::add_requests(std::vector<std::shared_ptr<RequestState>>* to) const {
  for (const std::list<Copying>* const copies : {&in_, &out_}) {
    for (const Copying& copying : *copies) to->push_back(copying.part.posted);
  }
}

void DeviceParts::drop() {
  for (std::list<Copying>* const copies : {&in_, &out_}) {
    for (Copying& copying : *copies) {
      std::vector<int> late;
      try {
        copying.lost = copying.lost || !copying.copies.happened(&late);
      } catch (const Error&) {
        copying.lost = true;
      }
      if (copying.lost) keep_memory(copying);
    }
    copies->clear();
  }
}

std::string DeviceParts::take_note() {
  std::lock_guard<std::mutex> lock(note_mutex_);
  return std::exchange(note_, {});
}

}  // namespace mykv
