/* A rank's runtime thread, and the threads that stand in for it and take its loop, for spin: docs/protocol.md says what is
 * checked, and how.
 *
 * Thread is the runtime's thread, a Caller a thread in Work::wait, a Changer another rank that changes the table and
 * rings this rank's bell after that, without a lock. One step here is one access to memory that others look at, or
 * something that the kernel makes indivisible. Memory is sequentially consistent, as all these accesses are in the code.
 *
 * A sleep has no time limit here, unlike in the code. So a lost wake-up is a deadlock.
 *
 * CHANGES: how many ranks change something, once each. CALLERS: how many callers; caller n waits for n changes, or for
 * all. TIMED: a caller may stop waiting at any moment. EARLY: the rank leaves at any moment, not after all changes.
 */

#ifndef CHANGES
#define CHANGES 2
#endif
#ifndef CALLERS
#define CALLERS 2
#endif
#ifdef TIMED
#define STOPS_WAITING true
#else
#define STOPS_WAITING false
#endif
#ifdef EARLY
#define MAY_LEAVE true
#else
#define MAY_LEAVE (handled == CHANGES)
#endif

/* Bell (csrc/table/bell.cpp). */
/* Of count_ only one thing matters: whether it has changed since the thread, or the stand-in, has `seen` it. */
bit thread_rang, stand_in_rang;
bit has_stand_in, thread_sleeps, stand_in_sleeps; /* state_ */
bit thread_asleep, stand_in_asleep;               /* in the kernel's queue */

bit taken;    /* RuntimeThread::loop_taken_ */
byte todo;    /* changes in the table that this rank has not looked at */
byte handled; /* changes that it has */
bit leaving, ended;
byte over; /* callers that have returned */

/* What an error in the code would look like: -D of one of these must make the check fail. */
#ifdef RINGS_THE_THREAD
#define STAND_IN_IS_RUNG false
#else
#define STAND_IN_IS_RUNG (looked & 1)
#endif
#ifdef NO_RING_AT_THE_END
#define NEEDS_RING false
#else
#ifdef LEAVING_FORGOTTEN
#define NEEDS_RING stand_in_rang
#else
#ifdef RINGS_FORGOTTEN
#define NEEDS_RING left
#else
#define NEEDS_RING (left || stand_in_rang)
#endif
#endif
#endif
#ifdef SEEN_AFTER_ROUND
#define SEE_LATE(rang) rang = 0
#else
#define SEE_LATE(rang) skip
#endif

inline ring() {
  d_step { thread_rang = 1; stand_in_rang = 1 };
  looked = has_stand_in + 2 * thread_sleeps + 4 * stand_in_sleeps;
  d_step {
    if
    :: STAND_IN_IS_RUNG && (looked & 4) -> stand_in_asleep = 0
    :: !STAND_IN_IS_RUNG && (looked & 2) -> thread_asleep = 0
    :: else
    fi;
    looked = 0
  }
}

/* Bell::wait: the kernel compares the count and puts the thread to sleep in one step. */
inline sleep(sleeps, asleep, rang) {
  sleeps = 1;
  asleep = !rang;
  asleep == 0;
  sleeps = 0
}

/* RuntimeThread::work */
inline round() {
  d_step {
    assert(taken);
    worked = (todo > 0);
    handled = handled + todo;
    todo = 0
  }
}

active proctype Thread() {
  bit worked, was_leaving;
look:
  thread_rang = 0; /* seen = count() */
  if
  :: atomic { !taken -> taken = 1 }
  :: atomic { taken -> skip };
     sleep(thread_sleeps, thread_asleep, thread_rang);
     goto look
  fi;
  was_leaving = leaving;
  round();
  if
  :: worked ->
     taken = 0;
     goto look
  :: !worked && was_leaving -> goto end_of_rank /* the loop stays taken */
  :: else
  fi;
  SEE_LATE(thread_rang);
  taken = 0;
  sleep(thread_sleeps, thread_asleep, thread_rang);
  goto look;
end_of_rank:
  ended = 1
}

/* Work::wait, RuntimeThread::stand_in */
proctype Caller(byte need) {
  byte looked;
  bit worked, last, left, is_over;
  if
  :: handled >= need -> goto returned
  :: atomic { handled < need && !taken -> taken = 1 }
  :: handled < need && taken -> goto asleep
  fi;
  has_stand_in = 1;
rounds:
  stand_in_rang = 0;
  if
  :: leaving ->
     left = 1;
     goto give_back
  :: else
  fi;
  round();
  SEE_LATE(stand_in_rang);
  if
  :: handled >= need -> is_over = 1
  :: handled < need && STOPS_WAITING -> is_over = 1
  :: handled < need -> is_over = 0
  fi;
  if
  :: is_over && (!worked || last) ->
     left = (worked || leaving);
     goto give_back
  :: is_over && worked && !last ->
     last = 1;
     goto rounds
  :: !is_over && worked -> goto rounds
  :: else
  fi;
  sleep(stand_in_sleeps, stand_in_asleep, stand_in_rang);
  goto rounds;
give_back:
#ifdef LOOP_BEFORE_BELL
  taken = 0;
  has_stand_in = 0;
#else
  has_stand_in = 0;
  taken = 0;
#endif
  if
  :: NEEDS_RING -> d_step { left = 0; worked = 0; last = 0; is_over = 0 }; ring()
  :: else -> d_step { left = 0; worked = 0; last = 0; is_over = 0 }
  fi;
asleep: /* on the request's condition variable */
  (handled >= need || ended || STOPS_WAITING);
returned:
  over++
}

proctype Changer() {
  byte looked;
  todo++;
  ring()
}

/* Runtime::leave */
proctype Leaver() {
  byte looked;
  MAY_LEAVE;
  leaving = 1;
  ring();
  (ended && over == CALLERS)
}

init {
  byte n;
  atomic {
    for (n : 1 .. CHANGES) { run Changer() }
    for (n : 1 .. CALLERS) { run Caller((n > CHANGES -> CHANGES : n)) }
    run Leaver()
  }
}
