// The steps of a part on one rank: it gets a share, is entered in the host's table, and ends with a result or an error.
#pragma once

#include <memory>
#include <string>

#include "runtime/context.h"
#include "runtime/requests.h"
#include "runtime/send_queue.h"
#include "runtime/spin_policy.h"
#include "runtime/timeline_notes.h"
#include "transport/mpi/compression_state.h"

namespace mykv {

// Used by the runtime's thread. Posting threads may call send(), copy_out_and_leave(), leave_entry() and
// complete_request() for the only part of a request.
class Parts {
 public:
  Parts(RuntimeContext& context, Requests& requests, SendQueue& queue, SpinPolicy& spin_policy, TimelineNotes& notes)
      : context_(context), requests_(requests), queue_(queue), spin_policy_(spin_policy), notes_(notes) {}

  // Creates a part without a share.
  static Part make(const std::shared_ptr<RequestState>& posted, size_t number);
  // The request's operation, with the count and the root of the part.
  static Operation operation_of(const Part& part);
  // Which entries of the host's table the part may take.
  EntryQuota due(const RequestState& posted, size_t number) const;

  // Gives the part its share or a refusal, and enters it in the host's table. False: the table is full. `posting`: the
  // calling thread posts the request, and may do the work of all ranks.
  bool send(const std::shared_ptr<RequestState>& posted, size_t number, std::string refusal, bool posting);
  enum class Arrived {
    table_full,
    under_way,  // another thread finishes the part, or has finished it
    over,       // the operation has ended: the caller finishes the part with the entry's error
  };
  // Enters a part with a share in the host's table.
  Arrived arrive(Part& part, const Operation& operation, const std::string& refusal, bool posting);
  // Copies out the part's result, unless it has an error, and ends the part.
  void copy_out_and_leave(const Part& part, const Failure& error);
  // Ends a part whose result is where it belongs, or that has none. The last part ends the request. `copied_out`: when
  // the result was copied, for the timeline; empty: it was not.
  void leave_entry(const Part& part, const Failure& error, const PartRecord::Interval& copied_out);
  // Ends a request, with an error or (null) with its result.
  void complete_request(RequestState& posted, const Failure* error);
  // Drops the error feedback of compression for all names that begin with `prefix`.
  void forget(const std::string& prefix) { compressions_.forget(prefix); }

 private:
  std::string take_share(Part& part, const Operation& operation, bool posting);
  HostTable::Arriving arriving_of(const Part& part, const Operation& operation, const std::string& refusal,
                                  bool posting) const;
  void copy_in(const Request& request, const Operation& op, const Part& part) const;
  void copy_out(const Request& request, size_t begin, size_t count, const char* slot) const;
  void put_text(Part& part, const std::string& text);
  void release_text(const Part& part);
  void release_slot(const Part& part);
  void count(const Part& part, const Failure& error, int64_t waited_ns);

  RuntimeContext& context_;
  Requests& requests_;
  SendQueue& queue_;
  SpinPolicy& spin_policy_;
  TimelineNotes& notes_;
  CompressionStates compressions_;
};

}  // namespace mykv
