// What the ranks do, one function for each idea. Each takes a seed, from which all of its choices come (not the
// scheduler's), and throws Failed.
#pragma once

#include <cstdint>

namespace mykv::testing {

// Operations of every kind and size in another order on each rank, with watchers beside them; results as computed here.
void random_operations(uint32_t seed);
// The same while a timeline starts and stops.
void operations_on_a_timeline(uint32_t seed);
// Refusals and differences fail one operation on all ranks, and the others are right.
void failing_requests(uint32_t seed);
// An operation that one rank has not arrived to is given up, by any rank and at any time.
void given_up(uint32_t seed);
// A rank leaves, or breaks off, in the middle: each operation fails or is right.
void departures(uint32_t seed);
// A rank breaks off in the middle of one in place: nobody writes into an array any more whose owner has the error.
void arrays_after_errors(uint32_t seed);
// Questions about who keeps whom waiting, and the answers.
void stall_questions(uint32_t seed);
// The table by itself: a reader that lags behind gets whole events or is told that it missed some.
void log_overruns(uint32_t seed);
// A rank keeps the table locked; the others give a verdict, and that rank finds out.
void locks_given_up(uint32_t seed);
// Two threads that wake each other, with no time limit to save them.
void bells(uint32_t seed);

}  // namespace mykv::testing
