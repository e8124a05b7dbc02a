/* The protocol of the ranks of one host, for spin: docs/protocol.md says what it stands for, what is checked, and how.
 *
 * Each rank is two processes: Poster is a thread of MXNet's engine that posts requests, Thread the runtime's own one.
 * What is one step here is one access to memory that others look at without the lock of the table, or something that
 * this lock, Requests::mutex_ or the kernel makes indivisible. Memory is sequentially consistent: what the code's weaker
 * orders allow is ThreadSanitizer's business (docs/sanitizers.md).
 *
 * Sleeping has no time limit here, though it has one in the code, so that a lost wake-up is a deadlock. The graph of
 * states has no cycle, so where there is no deadlock every rank ends.
 *
 * RANKS, OPERATIONS: how many. FIRST, SECOND: of which kinds. ENTRIES: of the table; 1: the second operation uses the first one's again, and
 * meanwhile the table is full. LOG: slots of the log; 2: it is overrun.
 */

#ifndef RANKS
#define RANKS 3
#endif
#ifndef OPERATIONS
#define OPERATIONS 2
#endif
#define ANYBODY RANKS
#define ALL_RANKS ((1 << RANKS) - 1)
#define ALL_OPERATIONS ((1 << OPERATIONS) - 1)

/* SMALL: done whole by the rank that comes last, in the thread that posts it, unless the table was full.
 * SHARED: in chunks that whoever is awake takes.
 * OWNED: sent by the runtime's thread, reduced by its owner. */
#define SMALL 0
#define SHARED 1
#define OWNED 2
#ifndef FIRST
#define FIRST SMALL
#endif
#ifndef SECOND
#define SECOND SHARED
#endif
#ifndef POSTERS
#define POSTERS RANKS
#endif
#ifndef ENTRIES
#define ENTRIES 1
#endif
#ifndef LOG
#define LOG 4
#endif
#define EVENTS 4
#define KIND(op) ((op) == 0 -> FIRST : SECOND)
#define CHUNKS(op) (KIND(op) == SHARED -> 2 : 1)
#define OWNER(op) (KIND(op) == OWNED -> 1 : ANYBODY)

/* HostTable::workers() and works_on(), as on two cores: the thread of the rank that comes last is woken, which may be another
 * one than that which posts, and that of the next rank; any rank that is awake works. With more ranks than cores
 * (SAME_WORKERS) the same two ranks are always woken, and only they work. */
#ifdef SAME_WORKERS
#ifdef OTHERS_ARE_WOKEN
#define WORKERS(me) 4
#else
#define WORKERS(me) 3
#endif
#define WORKS_ON(me) ((me) < 2)
#else
#define WORKERS(me) ((1 << (me)) | (1 << (((me) + 1) % RANKS)))
#define WORKS_ON(me) 1
#endif

/* Each rank has two slots and takes the first that is free. */
#define SLOTS 2
#define MOST_CHUNKS 2
#define INPUT(op) (3 * (op) + 1)
#define TORN(op) (3 * (op) + 2) /* somebody reads it and writes it */
#define RESULT(op) (3 * (op) + 3)
#define IS_TORN(value) ((value) % 3 == 2)
#define CONTENT(r, s, c) content[((r) * SLOTS + (s)) * MOST_CHUNKS + (c)]
byte content[RANKS * SLOTS * MOST_CHUNKS];

#define GATHERING 0
#define TAKEN 1
#define READY 2
#define DONE 3

typedef Entry {
  byte operation; /* plus one; 0: free */
  byte generation;
  byte state;
  byte arrived; /* a bit for each rank */
  byte left;
  byte next_chunk;
  byte finished_pieces;
  bit failed;
  byte slot[RANKS];
};
Entry entry[ENTRIES];
bit lock; /* SharedMutex */

/* An event: generation, entry, whether it is done. */
#define EVENT(g, e, d) (4 * (g) + 2 * (e) + (d))
#define ENTRY_OF(event) (((event) / 2) % 2)
byte place[LOG];
byte tail;
byte truth[EVENTS]; /* what was appended, to be compared with what a reader gets */

/* Of the count only one thing matters: whether it has changed since the thread has `seen` it. */
typedef Bell {
  bit busy; /* the thread has found something in this round: see WORKED */
  bit rang;
  bit sleeping;
  bit asleep; /* in the kernel's queue */
};
Bell bell[RANKS];

typedef Part {
  byte operation; /* plus one; 0: none */
  byte generation;
  bit slot;
  bit started;
};
typedef Rank {
  Part part[ENTRIES]; /* Requests::parts_ */
  byte posted;        /* a bit for each operation: for the thread to send */
  byte in_use;        /* a bit for each slot */
  byte ended;         /* a bit for each operation: done() was called */
  byte failed;        /* with an error */
  bit stopping;
};
Rank rank[RANKS];

/* Of single steps only. */
hidden byte c, who, k;

/* A round that has found something ends with reading the count anew, so until then it does not matter who rings. */
#define WORKED worked = 1; bell[me].busy = 1; bell[me].rang = 0

/* What an error in the code would look like: -D of one of these must make the check fail. */
#ifdef RING_BEFORE_APPEND
#define RINGS_FIRST 1
#else
#define RINGS_FIRST 0
#endif
#ifdef SEEN_AFTER_WORK
#define WAKE bell[me].sleeping = 0
#else
#define WAKE bell[me].sleeping = 0; bell[me].rang = 0 /* which is where the loop begins again */
#endif
#ifdef NO_GENERATION
#define SAME_GENERATION(e) true
#else
#define SAME_GENERATION(e) (rank[me].part[e].generation == event / 4)
#endif
#ifdef FREED_EARLY
#define LAST_TO_LEAVE 1
#else
#define LAST_TO_LEAVE RANKS
#endif
#ifdef NO_OVERRUN_CHECK
#define OVERRUN false
#else
#define OVERRUN (tail - head >= LOG)
#endif
#ifdef RING_LOOKS_FIRST
#define SEES_SLEEPER (looked & (1 << who))
#else
#define SEES_SLEEPER bell[who].sleeping
#endif
#ifdef WAIT_WITHOUT_SEEN
#define NOT_RUNG true
#else
#define NOT_RUNG (bell[me].rang == 0)
#endif

/* ---------------------------------------------------------------- bells (csrc/table/bell.cpp) */

/* Counting and looking for a sleeper are one step, though two in the code: whoever begins to wait between the two finds
 * the count changed. So are the rings of several bells, since nothing holds up whoever rings. */
inline ring_all(mask) {
  who = 0;
  do
  :: who < RANKS ->
     if
     :: (mask & (1 << who)) ->
        bell[who].rang = !bell[who].busy; /* count_ */
        if
        :: SEES_SLEEPER -> bell[who].asleep = 0 /* FUTEX_WAKE */
        :: else
        fi
     :: else
     fi;
     who++
  :: else -> break
  od;
  looked = 0
}

/* The planted error: who sleeps is looked at before the count. */
#ifdef RING_LOOKS_FIRST
#define LOOK looked = bell[0].sleeping + 2 * bell[1].sleeping + 4 * bell[RANKS - 1].sleeping;
#else
#define LOOK
#endif

/* ---------------------------------------------------------------- the table (csrc/table/host_table.cpp) */

/* An event under the lock, which is given back, and then the bells of the ranks that must know. It is three steps or,
 * where a reader can be overtaken by writers, four: a place of the log is filled before the tail moves. Otherwise a place behind
 * the tail never changes again, and nobody looks at those before it. */
inline fill_place(e, is_done) {
  truth[tail] = EVENT(entry[e].generation, e, is_done);
  place[tail % LOG] = truth[tail]
}

/* Ends an atomic sequence. */
inline publish(e, is_done) {
  if
  :: RINGS_FIRST -> ring_all(to_ring)
  :: else ->
     fill_place(e, is_done);
#if LOG >= EVENTS
     tail++
#endif
  fi
}

inline publish_rest(e, is_done) {
  if
  :: to_ring != 0 ->
#if LOG < EVENTS
     tail++;
#endif
     d_step {
       if
       :: RINGS_FIRST -> fill_place(e, is_done); tail++; to_ring = 0
       :: else
       fi;
       lock = 0
     };
     LOOK
     d_step { ring_all(to_ring); to_ring = 0 }
  :: else
  fi
}

/* What nobody reads again is set to zero, here and below, so that states that differ in nothing else are one. */
inline forget_slots(e) {
  who = 0;
  do
  :: who < RANKS -> entry[e].slot[who] = 0; who++
  :: else -> break
  od
}

/* Under the lock. */
inline end_entry(e, its_error) {
  entry[e].state = DONE;
  entry[e].failed = its_error;
  forget_slots(e);
  to_ring = entry[e].arrived & ~(1 << me)
}

inline drop_part(its_entry) {
  rank[me].part[its_entry].operation = 0;
  rank[me].part[its_entry].generation = 0;
  rank[me].part[its_entry].slot = 0;
  rank[me].part[its_entry].started = 0
}

/* From now on an event finds the part. */
inline claim(op) {
  rank[me].part[at].operation = op + 1;
  rank[me].part[at].generation = born;
  rank[me].part[at].slot = slot;
  rank[me].part[at].started = 0
}

/* HostTable::arrive(): `at` is the entry, ENTRIES where there is none left; `last` and `over` tell the rest. */
inline arrive(op, may_run_inline) {
  LOOK
  d_step {
      lock == 0;
      copy_in(op); /* before the lock in the code; nobody sees it before the arrival */
      at = 0;
      do
      :: at < ENTRIES && entry[at].operation != op + 1 -> at++
      :: else -> break
      od;
      if
      :: at == ENTRIES ->
         at = 0;
         do
         :: at < ENTRIES && entry[at].operation != 0 -> at++
         :: else -> break
         od;
         if
         :: at < ENTRIES ->
            entry[at].operation = op + 1;
            entry[at].generation++;
            entry[at].state = GATHERING;
            entry[at].arrived = 0;
            entry[at].left = 0;
            entry[at].next_chunk = 0;
            entry[at].finished_pieces = 0;
            entry[at].failed = 0
         :: else
         fi
      :: else
      fi;
      if
      :: at < ENTRIES ->
         assert(!(entry[at].arrived & (1 << me)));
         entry[at].arrived = entry[at].arrived | (1 << me);
         entry[at].slot[me] = slot;
         born = entry[at].generation;
#ifndef CLAIM_LATE
         claim(op);
#endif
         over = (entry[at].state == DONE);
         last = (!over && entry[at].arrived == ALL_RANKS);
         if
         :: last && may_run_inline && KIND(op) == SMALL -> entry[at].state = TAKEN
         :: last && !(may_run_inline && KIND(op) == SMALL) ->
            entry[at].state = READY;
            last = 0;
            lock = 1;
            /* HostTable::wake_workers(). */
            to_ring = (OWNER(op) == ANYBODY -> WORKERS(me) : 1 << OWNER(op))
         :: else
         fi
      :: else
      fi;
      if
      :: to_ring != 0 -> publish(at, 0)
      :: else
      fi
  };
  publish_rest(at, 0)
#ifdef CLAIM_LATE
  ;
  d_step {
    if
    :: at < ENTRIES -> claim(op)
    :: else
    fi
  }
#endif
}

/* One more chunk is finished ... */
inline count_chunk(e) {
  entry[e].finished_pieces++;
  all_done = (entry[e].finished_pieces == CHUNKS(entry[e].operation - 1))
}

/* ... and the last one ends the operation. */
inline end_if_all_done(e) {
  if
  :: all_done ->
     LOOK
     d_step {
       lock == 0;
       all_done = 0;
       if
       :: entry[e].state == READY || entry[e].state == TAKEN ->
          lock = 1;
          end_entry(e, 0);
          publish(e, 1)
       :: else
       fi
     };
     publish_rest(e, 1)
  :: else
  fi
}

/* HostTable::leave(): counts without the lock ... */
inline leave(place_left) {
  entry[place_left].left++;
  is_last = (entry[place_left].left == LAST_TO_LEAVE)
}

/* ... under which the last rank frees the entry. */
inline free_entry(place_left) {
  entry[place_left].operation = 0;
  entry[place_left].state = GATHERING;
  entry[place_left].arrived = 0;
  entry[place_left].left = 0;
  entry[place_left].failed = 0;
  is_last = 0
}

/* ---------------------------------------------------------------- slots */

inline copy_in(op) {
  slot = (rank[me].in_use & 1);
  assert(!(rank[me].in_use & (1 << slot)));
  rank[me].in_use = rank[me].in_use | (1 << slot);
  c = 0;
  do
  :: c < CHUNKS(op) ->
     assert(!IS_TORN(CONTENT(me, slot, c))); /* nobody else reads or writes it */
     CONTENT(me, slot, c) = INPUT(op);
     c++
  :: else -> break
  od
}

inline give_back(its_slot) { rank[me].in_use = rank[me].in_use & ~(1 << its_slot) }

/* Unless another rank is at it, or another operation has filled the slot. */
inline forget_content(what, its_slot) {
  c = 0;
  do
  :: c < MOST_CHUNKS ->
     if
     :: CONTENT(me, its_slot, c) == RESULT(what) -> CONTENT(me, its_slot, c) = 0
     :: else
     fi;
     c++
  :: else -> break
  od
}

/* The chunk of every rank's slot is read and written; others run between the two halves. */
inline begin_reduce(e, chunk) {
  who = 0;
  do
  :: who < RANKS ->
     assert(CONTENT(who, entry[e].slot[who], chunk) == INPUT(entry[e].operation - 1));
     CONTENT(who, entry[e].slot[who], chunk) = TORN(entry[e].operation - 1);
     who++
  :: else -> break
  od
}

inline end_reduce(e, chunk) {
  who = 0;
  do
  :: who < RANKS ->
     assert(CONTENT(who, entry[e].slot[who], chunk) == TORN(entry[e].operation - 1));
     CONTENT(who, entry[e].slot[who], chunk) = RESULT(entry[e].operation - 1);
     who++
  :: else -> break
  od
}

inline end_request(which, its_error) {
  assert(!(rank[me].ended & (1 << which)));
  rank[me].ended = rank[me].ended | (1 << which);
  if
  :: its_error -> rank[me].failed = rank[me].failed | (1 << which)
  :: else
  fi
}

inline copy_out(its_entry, what, its_slot) {
  c = 0;
  do
  :: c < CHUNKS(what) && !entry[its_entry].failed ->
     /* The whole of the result, and of this operation. */
     assert(CONTENT(me, its_slot, c) == RESULT(what));
     c++
  :: else -> break
  od
}

/* Parts::copy_out_and_leave() of a part that this thread has taken out of parts_; `after` is this thread's own business. */
#ifdef LEFT_BEFORE_COPIED
#define FINISH_PART(its_entry, what, its_slot, after) \
  d_step { give_back(its_slot); leave(its_entry) }; \
  if \
  :: d_step { is_last && lock == 0 -> free_entry(its_entry) } \
  :: !is_last \
  fi; \
  d_step { end_part(its_entry, what, its_slot); after }
#else
#define FINISH_PART(its_entry, what, its_slot, after) \
  d_step { \
    end_part(its_entry, what, its_slot); \
    give_back(its_slot); \
    leave(its_entry); \
    if \
    :: !is_last -> after \
    :: else \
    fi \
  }; \
  if \
  :: d_step { is_last && lock == 0 -> free_entry(its_entry); after } \
  :: !is_last \
  fi
#endif

inline end_part(its_entry, what, its_slot) {
  copy_out(its_entry, what, its_slot);
  forget_content(what, its_slot);
  end_request(what, entry[its_entry].failed)
}

/* ---------------------------------------------------------------- to the host's table (csrc/runtime/parts.cpp) */

#define FORGET_PART at = 0; born = 0; slot = 0; last = 0; over = 0; mine = 0

/* `no_room` where the table is full. */
inline send_part(op, may_run_inline) {
  arrive(op, may_run_inline);
  if
  :: at == ENTRIES -> d_step { give_back(slot); no_room = 1; FORGET_PART }
  :: at < ENTRIES && last ->
     d_step { begin_reduce(at, 0) };
     d_step { end_reduce(at, 0); count_chunk(at) };
     end_if_all_done(at)
  :: else
  fi;
  if
  :: last || over ->
     /* Unless the rank's thread has seen the news already. */
     d_step {
       mine = (rank[me].part[at].operation == op + 1 && rank[me].part[at].generation == born);
       if
       :: mine -> drop_part(at)
       :: else -> FORGET_PART
       fi
     };
     if
     :: mine -> FINISH_PART(at, op, slot, FORGET_PART)
     :: else
     fi
  :: else -> d_step { FORGET_PART }
  fi
}

/* The first rank in another order than the others. */
#define NTH(n) (me == 0 -> OPERATIONS - 1 - (n) : (n))

proctype Poster(byte me) {
  byte n, at, born, to_ring, looked;
  bit slot, no_room, last, over, mine, all_done, idle, is_last;
  if
  :: me >= POSTERS ->
     n = OPERATIONS
  :: else
  fi;
  do
  :: n < OPERATIONS ->
     if
     :: KIND(NTH(n)) == OWNED -> no_room = 1
     :: else -> send_part(NTH(n), 1)
     fi;
     if
     :: no_room ->
        LOOK
        d_step {
          rank[me].posted = rank[me].posted | (1 << NTH(n));
          no_room = 0;
          ring_all(1 << me);
          n++
        }
     :: else -> n++
     fi
  :: else -> break
  od;
  /* The program waits for its results, and leaves. */
  n = 0;
  LOOK
  d_step { rank[me].ended == ALL_OPERATIONS; rank[me].stopping = 1; ring_all(1 << me) }
}

/* ---------------------------------------------------------------- the runtime's thread (runtime_thread.cpp) */

/* Whether a part that the table had no room for could be sent now. In the code it is tried again every millisecond,
 * which changes nothing where this does not hold. */
#define HAS(what) (entry[0].operation == (what) || entry[ENTRIES - 1].operation == (what))
#define FITS(op) ((rank[me].posted & (1 << (op))) && (HAS(0) || HAS((op) + 1)))

inline handle_event() {
    k = ENTRY_OF(event);
    if
    :: rank[me].part[k].operation != 0 && SAME_GENERATION(k) ->
       if
       :: (event & 1) ->
          finished[k] = rank[me].part[k].operation;
          finished_slot[k] = rank[me].part[k].slot;
          drop_part(k);
          running[k] = 0
       :: !(event & 1) && !rank[me].part[k].started ->
          rank[me].part[k].started = 1;
          running[k] = (OWNER(rank[me].part[k].operation - 1) == ANYBODY && WORKS_ON(me) ||
                        OWNER(rank[me].part[k].operation - 1) == me)
       :: else
       fi
    :: else
    fi;
    event = 0
}

/* The log was overwritten: what happened is read off the entries of this rank's parts. */
inline rescan() {
  e = 0;
  do
  :: e < ENTRIES ->
     event = (rank[me].part[e].operation != 0 -> EVENT(rank[me].part[e].generation, e, 1) : 0);
     if
     :: event != 0 ->
        atomic {
          lock == 0;
          event = (entry[e].state == DONE -> event : (entry[e].state == READY -> event - 1 : 0))
        };
        if
        :: event != 0 -> d_step { handle_event() }
        :: else
        fi
     :: else
     fi;
     e++
  :: else -> break
  od;
  e = 0
}

#if ENTRIES > 1
#define HAS_FINISHED (finished[0] != 0 || finished[1] != 0)
#define IS_RUNNING (running[0] || running[1])
#else
#define HAS_FINISHED (finished[0] != 0)
#define IS_RUNNING running[0]
#endif

#define FORGET_FINISHED(e) finished[e] = 0; finished_slot[e] = 0; WORKED

inline take_finished(e) {
  if
  :: finished[e] != 0 -> FINISH_PART(e, (finished[e] - 1), finished_slot[e], FORGET_FINISHED(e))
  :: else
  fi
}

/* HostTransport::progress() */
inline progress(e) {
  if
  :: running[e] ->
     d_step {
       chunk = entry[e].next_chunk;
       if
       :: chunk < CHUNKS(entry[e].operation - 1) ->
          entry[e].next_chunk++;
          WORKED;
          begin_reduce(e, chunk)
       :: else -> /* there the code counts on, which nobody sees */
          running[e] = 0;
          chunk = MOST_CHUNKS
       fi
     };
     if
     :: chunk < MOST_CHUNKS ->
#ifdef COUNTED_BEFORE_WRITTEN
        d_step { count_chunk(e) };
        end_if_all_done(e);
        atomic { end_reduce(e, chunk) }
#else
        d_step { end_reduce(e, chunk); count_chunk(e) };
        end_if_all_done(e)
#endif
     :: else
     fi;
     chunk = 0
  :: else
  fi
}

proctype Thread(byte me) {
  byte head, seen_tail, event, at, born, e, chunk, to_ring, looked;
  byte finished[ENTRIES];
  bit finished_slot[ENTRIES], running[ENTRIES];
  bit slot, worked, blocked, no_room, last, over, mine, all_done, idle, is_last;

look: /* seen = count() is one step with what led here */
  seen_tail = 0;
#if LOG < EVENTS
take_events:
  if
  :: head == tail -> goto work
  :: d_step { head != tail -> seen_tail = tail; WORKED }
  fi;
  event = place[head % LOG];
  if
  :: d_step { OVERRUN -> head = seen_tail; event = 0; seen_tail = 0 };
     rescan()
  :: d_step { !(OVERRUN) -> assert(event == truth[head]); head++; seen_tail = 0 };
     d_step { handle_event() }
  fi;
  goto take_events;
work:
#else
  d_step {
    do
    :: head == tail -> break
    :: else ->
       event = place[head];
       assert(event == truth[head]);
       head++;
       WORKED;
       handle_event()
    od;
    /* Looks that find nothing are one step with this one. */
    idle = (!worked && !HAS_FINISHED && rank[me].posted == 0 && !IS_RUNNING)
  };
  if
  :: idle -> goto nothing_to_do
  :: else
  fi;
#endif
  take_finished(0);
#if ENTRIES > 1
  take_finished(1);
#endif

  /* start_parts() */
  if
  :: rank[me].posted == 0 -> goto parts_started
  :: rank[me].posted == ALL_OPERATIONS -> chunk = (me == 0 -> OPERATIONS - 1 : 0)
  :: rank[me].posted == 1 && OPERATIONS == 2 -> chunk = 0
  :: rank[me].posted == 2 && OPERATIONS == 2 -> chunk = 1
  fi;
  send_part(chunk, 0);
  d_step {
    blocked = no_room;
    if
    :: no_room -> no_room = 0
    :: else -> rank[me].posted = rank[me].posted & ~(1 << chunk); WORKED
    fi;
    chunk = ((blocked && rank[me].posted == 3) -> 2 - chunk : 0)
  };
  /* The table may have room for a later one. */
  if
  :: chunk != 0 ->
     send_part((chunk - 1), 0);
     d_step {
       if
       :: no_room -> no_room = 0
       :: else -> rank[me].posted = rank[me].posted & ~(1 << (chunk - 1)); WORKED
       fi;
       chunk = 0
     }
  :: else
  fi;
parts_started:
  progress(0);
#if ENTRIES > 1
  progress(1);
#endif

nothing_to_do:
  /* SpinPolicy::spin looks at the count too, and is left out: it only goes back earlier. FUTEX_WAIT is one step with what sets
   * `sleeping`: a ring between the two is found by the comparison, as one before them is. */
  if
  :: worked ->
     d_step { worked = 0; blocked = 0; bell[me].busy = 0 };
     goto look
  :: else
  fi;
#ifdef SEEN_AFTER_WORK
  bell[me].rang = 0;
#endif
  d_step {
    idle = rank[me].stopping;
    if
    :: idle -> bell[me].rang = 1 /* now it stays as it is */
    :: !idle ->
       bell[me].sleeping = 1;
       bell[me].asleep = NOT_RUNG
    fi
  };
  if
  :: idle -> goto ended
  :: else
  fi;
  d_step {
    (bell[me].asleep == 0 || (blocked && (FITS(0) || FITS(1))));
    bell[me].asleep = 0;
    blocked = 0;
    WAKE
  };
  goto look;
ended:
  skip
}

#ifdef GIVE_UP
/* Another thread of the first rank, which gives the last operation up, at any moment. */
proctype Watcher() {
  byte me, e, to_ring, looked;
  d_step {
    lock == 0;
    do
    :: e < ENTRIES && (entry[e].operation != OPERATIONS || entry[e].state != GATHERING) -> e++
    :: else -> break
    od;
    if
    :: e < ENTRIES ->
       lock = 1;
       end_entry(e, 1);
       to_ring = to_ring | 1; /* this rank's own thread as well */
       publish(e, 1)
    :: else
    fi
  };
  publish_rest(e, 1)
}
#endif

init {
  atomic {
    /* Ranks whose requests are all sent by their threads. */
    k = POSTERS;
    do
    :: k < RANKS -> rank[k].posted = ALL_OPERATIONS; k++
    :: else -> break
    od;
    run Poster(0); run Thread(0);
    run Poster(1); run Thread(1);
#if RANKS > 2
    run Poster(2); run Thread(2);
#endif
#ifdef GIVE_UP
    run Watcher()
#endif
  };
  atomic {
    _nr_pr == 1;
    /* An operation has the same fate on all ranks. */
    assert(rank[0].failed == rank[1].failed && rank[1].failed == rank[RANKS - 1].failed);
#ifndef GIVE_UP
    assert(rank[0].failed == 0);
#endif
    assert(entry[0].operation == 0 && entry[ENTRIES - 1].operation == 0)
  }
}
