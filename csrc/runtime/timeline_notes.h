// Writes a runtime's records to the timeline: the times of each part, read from the shared table before the rank leaves
// the entry, and of each request. Nothing is written for requests that were posted while the timeline was off.
#pragma once

#include <mutex>
#include <string>

#include "runtime/requests.h"
#include "table/host_table.h"
#include "timeline/timeline.h"
#include "world/world.h"

namespace mykv {

// Thread-safe.
class TimelineNotes {
 public:
  TimelineNotes(const World& world, HostTable& table) : world_(world), table_(table), interest_(table.stamp_flag()) {}

  // Begins to record a request if the timeline is on.
  static void begin(RequestState& posted);
  // Records the times of a part that is over, if its request is recorded.
  void end(const Part& part, const PartRecord::Interval& copied_out);
  // Writes the record of a request that has ended.
  void end(RequestState& posted, const Failure* error);
  // Records that the runtime's thread has been awake since this time, and is about to wait.
  void awake(int64_t since) const;

 private:
  void add(const Part& part, PartRecord times, const Entry& entry);

  const World& world_;
  HostTable& table_;
  std::mutex mutex_;  // guards RequestState::record
  Timeline::Interest interest_;
};

}  // namespace mykv
