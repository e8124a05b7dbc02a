#include "runtime/teardown.h"

#include <unistd.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "operations/signature.h"

namespace mykv {

namespace {

constexpr int64_t kPatienceUs = 1000000;  // how long to wait for the table's lock
// How long to wait until other ranks have ended the chunks of failed operations that they had begun.
constexpr int64_t kWritersNs = 1000000000;
constexpr int64_t kLostWritersNs = 200000000;  // the same, if a process with such a chunk may have died
constexpr int64_t kFlushNs = 20000000;         // time for MPI to put the last messages on the wire
constexpr useconds_t kLookUs = 1000;

}  // namespace

void Teardown::tell_departure() {
  if (!context_.agreement.speaks() || departure_told_ || context_.table.departed_rank() < 0) return;
  departure_told_ = true;
  if (context_.agreement.closed()) return;  // rank 0 knows already, since it has told this host
  const Departed gone = context_.table.departed();
  context_.agreement.depart(gone.rank, gone.reason);
}

void Teardown::end_in_order(const Failure& local_error) {
  if (context_.agreement.speaks() && context_.table.departed_rank() >= 0) tell_rank_0(context_.table.departed());
  wait_until_unused({});
  if (context_.nccl) context_.nccl->leave({});
  end_all(local_error);
}

void Teardown::break_down(const Departed& gone, const Failure& local_error, const Failure& peer_error) {
  requests_.refuse_new(local_error);
  context_.table.lock().set_patience(kPatienceUs, gone.what());
  const std::vector<uint32_t> mine = fail_entries(gone, local_error, peer_error);
  context_.transport->note_departed(gone);
  tell_rank_0(gone);
  events_.complete_results();
  wait_until_unused(mine);
  device_parts_.wait_for_copies();
  if (context_.nccl) context_.nccl->abort(mine);
  end_all(local_error);
}

// Ends this rank's entries in the host's table, and returns the entries without a result.
std::vector<uint32_t> Teardown::fail_entries(const Departed& gone, const Failure& local_error,
                                             const Failure& peer_error) {
  HostTable& table = context_.table;
  try {
    table.depart(gone.rank, gone.reason, true);
    // A thread that posted meanwhile may have added an entry; after depart() no thread can.
    const std::vector<uint32_t> mine = requests_.entries();
    for (uint32_t entry : mine) {
      const std::string name = shown_name(table.entry(entry).name);
      table.fail(entry, peer_error.empty() ? local_error : name + ": " + peer_error);
    }
    events_.find_finished(mine);
    return requests_.entries();
  } catch (const std::exception&) {
    // The shared table is unusable; the other ranks of this host notice that themselves.
    const std::vector<uint32_t> mine = requests_.entries();
    for (uint32_t entry : mine) table.stop_chunks(entry);
    return mine;
  }
}

// Sends the message itself: the first rank of this host, which usually sends it, may be the rank that is gone.
void Teardown::tell_rank_0(const Departed& gone) {
  // Sends the message again unless rank 0 has confirmed it: rank 0 may have failed before it told the other hosts, or
  // may not have answered. Repeating the message is harmless.
  const bool told = std::exchange(departure_told_, true) && context_.agreement.closed();
  if (!context_.world.has_several_hosts() || told) return;
  try {
    context_.agreement.depart_alone(gone.rank, gone.reason);
  } catch (const std::exception&) {
    // MPI is unusable.
  }
}

// When the caller of an operation gets the error, no rank may still use the operation's memory. Some MPIs report a
// message as sent while it waits in an internal queue, which only further MPI calls empty.
void Teardown::wait_until_unused(const std::vector<uint32_t>& mine) {
  const int64_t patience = commands_.lost() ? kLostWritersNs : kWritersNs;
  const int64_t least = context_.world.has_several_hosts() ? kFlushNs : 0;
  const auto still_written = [&](uint32_t entry) { return !context_.table.chunks_ended(entry); };
  for (const int64_t begun = now_ns(); now_ns() - begun < patience; usleep(kLookUs)) {
    context_.table.beat();
    bool over = context_.transport->uses_no_memory() && now_ns() - begun >= least;
    try {
      context_.agreement.progress_sending();
      over = over && !context_.agreement.sending();
    } catch (const std::exception&) {
      // MPI is unusable.
    }
    if (over && std::none_of(mine.begin(), mine.end(), still_written)) return;
  }
}

// Ends all requests that this rank still has, without other ranks.
void Teardown::end_all(const Failure& reason) {
  std::vector<std::shared_ptr<RequestState>> requests;
  device_parts_.add_requests(&requests);
  events_.add_requests(&requests);
  sender_.add_requests(&requests);
  requests = requests_.close(reason, std::move(requests));
  events_.drop();
  sender_.drop();
  device_parts_.drop();
  for (auto& posted : requests) {
    const Failure error = shown_name(posted->request.name) + ": " + reason;
    parts_.complete_request(*posted, &error);
  }
}

}  // namespace mykv
