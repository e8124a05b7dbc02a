#include "runtime/runtime.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/planted_faults.h"
#include "operations/operation.h"
#include "operations/request.h"
#include "operations/signature.h"

namespace mykv {

namespace {

constexpr useconds_t kLateUs = 500000;          // delay of the planted fault `late`
constexpr int64_t kLingerNs = 20000;            // how long a posting thread lingers; less than waking two threads takes
constexpr int64_t kLongLingerNs = 10000000000;  // duration of the planted fault `linger`
constexpr auto kLockPatience = std::chrono::seconds(1);  // how long a rank that breaks down waits for the table's lock
constexpr auto kLeavingLockPatience = std::chrono::seconds(5);  // the same for a rank that leaves

}  // namespace

Runtime::Runtime(MPI_Comm comm, const RuntimeOptions& options)
    : Runtime(std::make_unique<World>(comm, options.world), options) {}

Runtime::Runtime(std::unique_ptr<World> world, const RuntimeOptions& options)
    : context_(std::move(world), options),
      requests_(options.part_bytes, options.staging_bytes),
      spin_policy_(context_.world.local_size()),
      work_(context_, requests_, queue_, parts_, spin_policy_, commands_, notes_) {
  if (testing::checks_lock_order()) context_.table.lock().comes_before(requests_.mutex());
  thread_ = std::thread([this] { work_.run(); });
}

Runtime::~Runtime() {
  leave("it shut down");
  if (context_.transport->polling() || work_.gpus_use_slots()) context_.world.keep_segment();
  if (forked()) {
    work_.keep_gpu_objects();
  } else if (!work_.gpus_use_slots()) {
    context_.pinned.unregister();
  }
  if (commands_.lost() || forked()) context_.world.let_go();  // makes no MPI calls after a death or in a fork
  const bool quiet = context_.transport->quiet() && context_.agreement.quiet() && context_.inquiry.quiet();
  if (!forked() && quiet) context_.world.is_quiet();
}

std::shared_ptr<const Ticket> Runtime::take_ticket() {
  return forked() ? nullptr : turns_.take_ticket();  // in a fork the lock may never come free; post() reports the fork
}

void Runtime::require_own_process() const {
  if (!forked()) return;
  throw Error("mykv works only in the process that initialized it, and process " + std::to_string(getpid()) +
              " is a fork of it. Use mykv in the parent only, or start the child with the method 'spawn'");
}

void Runtime::forget(const std::string& prefix) {
  if (forked()) return;  // the names are the parent's
  parts_.forget(prefix);
  turns_.forget(prefix);
}

void Runtime::post(Request request) {
  auto posted = std::make_shared<RequestState>();
  posted->request = std::move(request);
  if (forked()) {
    try {
      require_own_process();
    } catch (const Error& error) {
      const Failure why = shown_name(posted->request.name) + ": " + error.failure();
      parts_.complete_request(*posted, &why);
    }
    return;
  }
  try {
    post_checked(posted);
  } catch (const TableVerdict&) {
    // The runtime's thread is about to break down and end all requests with the cause, or has done so.
    const Failure why = requests_.leave_to_thread(posted);
    if (!why.empty()) end_refused(*posted, why);
    context_.bell().ring();
  } catch (const std::exception& error) {
    end_refused(*posted, failure_of(error));
  }
}

void Runtime::refuse(std::string name, uint64_t turn, const std::string& reason) {
  Request request;
  request.name = std::move(name);
  request.turn = turn;
  request.ticket = take_ticket();
  request.signature = "a refusal";
  request.refusal = reason.empty() ? "no reason was given" : reason;
  request.done = [](const Failure*) {};
  post(std::move(request));
}

void Runtime::end_refused(RequestState& posted, const Failure& why) {
  if (!requests_.claim_end(posted)) return;
  const Failure error = shown_name(posted.request.name) + ": " + why;
  parts_.complete_request(posted, &error);
}

void Runtime::post_checked(const std::shared_ptr<RequestState>& posted) {
  Request& request = posted->request;
  const Operation& op = request.operation;
  TimelineNotes::begin(*posted);
  posted->number = hash_bytes(request.name.data(), request.name.size(), 0) + request.turn;
  posted->age = request.ticket ? request.ticket->number() : 0;
  posted->cut(context_.options.part_bytes);
  // Arrays that overlap in part are refused, since parts end in any order, and since the owner of a part reads and
  // writes the arrays in place.
  const bool may_be_owned = (request.scattered || request.inputs.size() == 1) && op.bytes() > kPostInlineBytes;
  if (request.refusal.empty() && (posted->parts > 1 || may_be_owned)) request.refusal = overlap_in_part(request);
  // A request that needs little or no copying is sent by the thread that posts it, which saves a wake-up.
  const bool ready = request.devices == nullptr && (request.in_place || op.bytes() <= kPostInlineBytes);
  const bool direct = op.road != DataPath::nccl && posted->parts == 1 && (!request.refusal.empty() || ready);
  requests_.take_over(posted, direct);
  if (direct) {
    if (testing::is_planted(testing::Fault::late)) usleep(kLateUs);
    request.may_linger =
        request.may_linger && !context_.world.has_several_hosts() && work_.may_stand_in() && requests_.idle();
    if (parts_.send(posted, 0, request.refusal, true)) {
      if (posted->lingers) linger(*posted);
      return;
    }
    posted->next = 0;
    requests_.take_over(posted, false);
  }
  context_.bell().ring();
}

void Runtime::linger(const RequestState& posted) {
  const auto over = [&] { return requests_.has_ended(posted); };
  work_.stand_in(over, now_ns() + (testing::is_planted(testing::Fault::linger) ? kLongLingerNs : kLingerNs));
  if (!over())
    context_.bell().ring();  // the runtime's thread stays awake for the rest of the time that spin_policy_ grants
}

std::vector<LateRank> Runtime::late_ranks() {
  require_own_process();
  const bool knows_all = context_.world.has_several_hosts() && context_.world.rank() == 0;
  return knows_all ? context_.agreement.late_ranks() : context_.table.late_ranks();
}

std::string Runtime::left_text(const std::string& reason) const { return departure_text(context_.label(), reason); }

void Runtime::leave(std::string reason) {
  if (forked()) {
    // The thread belongs to the parent process: there is nothing to stop.
    if (thread_.joinable()) thread_.detach();
    return;
  }
  std::lock_guard<std::mutex> leaving(leave_mutex_);
  if (!thread_.joinable()) return;
  // Adds the refusal to the reason, so that ranks that have not reached the refused operation learn the cause, even on
  // other hosts.
  if (const std::string refused = requests_.pending_refusal(); !refused.empty())
    reason += ", after it had refused " + refused;
  const bool broken = !requests_.refuse_new({"this rank has left: " + reason, ErrorCode::left});
  context_.table.lock().set_patience(std::chrono::microseconds(kLeavingLockPatience).count(), left_text(reason));
  try {
    if (context_.world.size() > 1 && !broken) context_.table.depart(context_.label(), reason);
  } catch (const Error&) {
    // The table has a verdict, which the other ranks see themselves.
  }
  commands_.leave(reason);
  thread_.join();
}

void Runtime::give_up(const std::unordered_map<std::string, Failure>& reasons, double least_seconds) {
  require_own_process();
  const auto operations = requests_.named(reasons, now_ns() - static_cast<int64_t>(least_seconds * 1e9));
  if (context_.world.has_several_hosts()) {
    commands_.give_up(operations);
  } else {
    for (const auto& [key, reason] : operations) context_.table.try_give_up(key, reason);
  }
}

void Runtime::break_down(const Failure& reason) {
  if (forked()) return;
  context_.table.lock().set_patience(std::chrono::microseconds(kLockPatience).count(), left_text(reason.text));
  commands_.break_down(reason);
}

void Runtime::give_verdict(const std::string& reason) {
  if (!forked()) context_.table.lock().give_verdict(reason);
}

void Runtime::lose(const Failure& reason) {
  if (forked()) return;
  commands_.lose(reason);
  break_down(reason);
}

Buffer::Buffer(std::shared_ptr<Runtime> runtime, size_t bytes)
    : runtime_(std::move(runtime)), offset_(runtime_->region().reserve(bytes)), bytes_(bytes) {}

Buffer::~Buffer() {
  // A forked child shares the segment: releasing memory in the child would take it from its parent.
  if (!runtime_->forked()) runtime_->region().release_reserved(offset_, bytes_);
}

char* Buffer::data() const { return runtime_->world().segment().base() + offset_; }

void Buffer::commit(size_t bytes) {
  runtime_->require_own_process();
  constexpr size_t kStep = size_t{64} << 10;  // fewer calls when small arrays fill a bucket one at a time
  std::lock_guard<std::mutex> lock(mutex_);
  if (bytes <= committed_) return;
  const size_t to = std::max(bytes, std::min(bytes_, (bytes + kStep - 1) / kStep * kStep));
  runtime_->region().commit(offset_ + committed_, to - committed_);
  committed_ = to;
}

}  // namespace mykv
