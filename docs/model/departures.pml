/* How an operation between hosts ends on all ranks when some leave or can do no more, for spin: docs/protocol.md says
 * what it stands for, what is checked, and how.
 *
 * Each rank is one process, the runtime's thread. One operation: all ranks of a host arrive, its first rank announces
 * that to rank 0, which answers all hosts when all have, and the owners of a slice on each host exchange it. What is one
 * step here is one change of the host's table under its lock, or one message. Messages of one rank to another keep their
 * order; nothing has a time limit, so a rank that nobody tells anything waits until the others have their answers: that
 * is a deadlock where nobody ever tells it.
 *
 * HOSTS, LOCAL: how many, and ranks on each. SLICES: owners of slices on each host. GOING: ranks that go at most.
 */

#ifndef HOSTS
#define HOSTS 2
#endif
#ifndef LOCAL
#define LOCAL 2
#endif
#ifndef SLICES
#define SLICES LOCAL
#endif
#ifndef GOING
#define GOING 2
#endif
#define RANKS (HOSTS * LOCAL)
#define HOST(r) ((r) / LOCAL)
#define SLICE(r) ((r) % LOCAL)
#define OWNS(r) (SLICE(r) < SLICES)
#define SPEAKS(r) (SLICE(r) == 0)
#define PEER(r, h) ((h) * LOCAL + SLICE(r))

#define GATHERING 0
#define ANNOUNCED 1
#define READY 2
#define DONE 3

typedef Host {
  byte state;
  bit failed;
  byte arrived;
  byte done;    /* slices */
  bit agreed;   /* it was ready once */
  bit departed; /* some rank has left, of this host or another */
  bit result;   /* one of its ranks has ended with the result ... */
  bit error;    /* ... or with an error */
};
Host host[HOSTS];

#define NOT_ASKED 0
#define UNDER_WAY 1
#define ENDED 2

typedef Rank {
  byte part;
  bit started; /* it has an exchange of its slice, and has sent its values */
  bit finished;
  bit notice; /* it has told its peers that it can do no more */
  bit torn;   /* its values are the program's again, though they may still be on their way */
};
Rank rank[RANKS];
byte ended;     /* ranks that have their answer */
byte going;     /* ranks that went of their own accord */
byte announced; /* what rank 0 knows: hosts ... */
bit closed_all; /* ... and that it has told all that a rank has left */

mtype = { ANNOUNCE, DEPART, VERDICT, CLOSE };
chan to_root[RANKS] = [3] of { mtype };
chan to_host[HOSTS] = [3] of { mtype };

/* HostTable::depart() and close(): what waits for ranks that have not arrived, or for other hosts, never runs. */
inline table_depart(h, announced_too) {
  host[h].departed = 1;
  if
  :: host[h].state == GATHERING || (announced_too && host[h].state == ANNOUNCED) ->
     host[h].state = DONE;
     host[h].failed = 1
  :: else
  fi
}

inline tell_all(what) {
  k = 0;
  do
  :: k < HOSTS -> to_host[k]!what; k++
  :: else -> break
  od
}

/* The ranks of a host all have the result, or none has. */
inline end_part(has_result) {
  if
  :: rank[me].part == UNDER_WAY ->
     ended++;
     if
     :: has_result -> host[HOST(me)].result = 1
     :: else -> host[HOST(me)].error = 1
     fi;
     assert(!host[HOST(me)].result || !host[HOST(me)].error)
  :: else
  fi;
  rank[me].part = ENDED
}

#define MAIL_FROM(r) :: atomic { me == 0 && !closed_all && nempty(to_root[r]) -> take_mail(r) }
inline take_mail(from) {
  if
  :: to_root[from]?ANNOUNCE ->
     announced++;
     if
     :: announced == HOSTS -> tell_all(VERDICT)
     :: else
     fi
  :: to_root[from]?DEPART -> closed_all = 1; tell_all(CLOSE)
  fi
}

/* Of the owners of the same slice on other hosts. */
#define ANY_PEER(holds) (holds(0) || holds(1) || holds(HOSTS - 1))
#define IS_PEER(h) ((h) != HOST(me))
/* One has said that it can do no more. */
#define HAS_SAID(h) (IS_PEER(h) && rank[PEER(me, h)].notice)
/* The values of one have not arrived. */
#define IS_LATE(h) (IS_PEER(h) && !rank[PEER(me, h)].started)
/* One may still read the values of this rank. */
#define IS_READING(h) (IS_PEER(h) && rank[PEER(me, h)].started && !rank[PEER(me, h)].finished && !rank[PEER(me, h)].notice)
#define IS_TORN(h) (IS_PEER(h) && rank[PEER(me, h)].torn)

#ifdef NO_NOTICE
#define SAYS_SO 0
#else
#define SAYS_SO OWNS(me)
#endif
#ifdef VERDICT_FORGOTTEN
#define ANSWERS_VERDICT 0
#else
#define ANSWERS_VERDICT 1
#endif
#ifdef ENDS_ITS_OWN
#define BREAKS_DOWN 0
#else
#define BREAKS_DOWN 1
#endif
#ifdef HELD_IS_LEFT
#define STAYS_WITH_IT 0
#else
#define STAYS_WITH_IT 1
#endif
#define HOLDS (rank[me].started && !rank[me].finished)
/* Other hosts may wait for this rank's slice. */
#ifdef OWES_WHAT_IT_HOLDS
#define OWES HOLDS
#else
#define OWES (OWNS(me) && host[HOST(me)].agreed && !rank[me].finished)
#endif
/* In down too. */
#ifdef RESULT_IS_DROPPED
#define TAKES_RESULTS 0
#else
#define TAKES_RESULTS 1
#endif
#ifdef NO_LOOK_AT_START
#define LOOKS_AT_START 0
#else
#define LOOKS_AT_START 1
#endif

proctype Thread(byte me) {
  byte k;
  bit told, said, leaving, closed;

  do
  :: ended == RANKS -> goto over /* all have their answers */

  /* The program asks. */
  :: atomic {
       rank[me].part == NOT_ASKED ->
       if
       :: host[HOST(me)].departed -> rank[me].part = ENDED; ended++
       :: else ->
          rank[me].part = UNDER_WAY;
          host[HOST(me)].arrived++;
          if
          :: host[HOST(me)].arrived == LOCAL -> host[HOST(me)].state = ANNOUNCED
          :: else
          fi
       fi
     }

  /* It leaves, or something fails: at any moment. */
  :: atomic { going < GOING && !leaving -> going++ };
     if
     :: atomic { leaving = 1; table_depart(HOST(me), 0) };
        if
        :: atomic { rank[me].part == NOT_ASKED -> rank[me].part = ENDED; ended++ }
        :: rank[me].part != NOT_ASKED
        fi
     :: goto down
     fi

  /* One that leaves waits in vain for what is under way. */
  :: leaving && rank[me].part == UNDER_WAY ->
     if
     :: BREAKS_DOWN -> goto down
     :: else -> end_part(0); goto over
     fi
  :: leaving && rank[me].part == ENDED && (!SPEAKS(me) || closed) -> goto over

  /* The first rank of a host (Agreement). */
  :: atomic { SPEAKS(me) && host[HOST(me)].state == ANNOUNCED && !said && !closed -> said = 1; to_root[me]!ANNOUNCE }
  :: atomic { SPEAKS(me) && host[HOST(me)].departed && !told -> told = 1;
       if
       :: !closed -> to_root[me]!DEPART
       :: else
       fi
     }
  :: atomic { SPEAKS(me) && to_host[HOST(me)]?[VERDICT] -> to_host[HOST(me)]?VERDICT;
       if
       :: host[HOST(me)].state == ANNOUNCED -> host[HOST(me)].state = READY; host[HOST(me)].agreed = 1
       :: else -> assert(host[HOST(me)].departed);
          if
          :: ANSWERS_VERDICT -> goto down
          :: else
          fi
       fi
     }
  :: atomic { SPEAKS(me) && to_host[HOST(me)]?[CLOSE] -> to_host[HOST(me)]?CLOSE;
       closed = 1;
       table_depart(HOST(me), 1)
     }

  /* Rank 0. */
  MAIL_FROM(0)
  MAIL_FROM(1)
#if RANKS > 2
  MAIL_FROM(2)
#endif
#if RANKS > 3
  MAIL_FROM(3)
#endif

  /* The exchange of the slice. */
  :: atomic { OWNS(me) && rank[me].part == UNDER_WAY && !rank[me].started && host[HOST(me)].state == READY ->
       if
       :: ANY_PEER(HAS_SAID) && LOOKS_AT_START -> goto down
       :: else -> rank[me].started = 1
       fi
     }
  :: atomic { HOLDS && host[HOST(me)].state == READY && !ANY_PEER(IS_LATE) ->
       assert(!ANY_PEER(IS_TORN));
       rank[me].finished = 1;
       host[HOST(me)].done++;
       if
       :: host[HOST(me)].done == SLICES -> host[HOST(me)].state = DONE
       :: else
       fi
     }
  :: HOLDS && ANY_PEER(HAS_SAID) -> goto down

  /* The result, or the error. */
  :: atomic { rank[me].part == UNDER_WAY && host[HOST(me)].state == DONE ->
       if
       :: OWES && STAYS_WITH_IT -> assert(host[HOST(me)].failed); goto down
       :: else -> end_part(!host[HOST(me)].failed)
       fi
     }
  od;

  /* Teardown::break_down() */
down:
  atomic {
    table_depart(HOST(me), 0);
    if
    :: rank[me].part == UNDER_WAY && host[HOST(me)].state != DONE -> host[HOST(me)].state = DONE; host[HOST(me)].failed = 1
    :: else
    fi
  };
  atomic {
    if
    :: SAYS_SO -> rank[me].notice = 1
    :: else
    fi
  };
  atomic {
    if
    :: me != 0 -> to_root[me]!DEPART
    :: me == 0 && !closed_all -> closed_all = 1; tell_all(CLOSE)
    :: else
    fi
  };
  /* Bounded in the code: those that do not answer were stopped, and look for notices before they go on. */
  !ANY_PEER(IS_READING);
  atomic {
    rank[me].torn = 1;
    if
    :: rank[me].part == NOT_ASKED -> rank[me].part = ENDED; ended++
    :: rank[me].part == UNDER_WAY -> end_part(TAKES_RESULTS && !host[HOST(me)].failed)
    :: else
    fi
  };
over:
  skip
}

init {
  byte r;
  atomic {
    do
    :: r < RANKS -> run Thread(r); r++
    :: else -> break
    od
  }
}
