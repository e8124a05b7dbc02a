"""Deadlock check: steps of trainers and calls that wait must come in the same order on all ranks; if not, an error.

A worker with less data than the others leaves its training loop and goes on to the evaluation. It waits for the others
in, say, barrier(), and they wait for its gradients: a deadlock. So a rank that waits for long asks whether other ranks
have begun a step of a trainer that this rank has not begun. If all ranks had the same order, that could not be: a rank
in a call that waits has begun all steps before the call, and no rank has begun a step behind it.

Then all ranks get an error: in the call that waits, and in the gradients of the step. A rank that had not come to this
call gets the same error in its next call that waits. In the same way a rank that waits finds ranks that save the states
of an optimizer without it, and ranks that wait in a call of another process set.

Only members of the call's process set count: other ranks may go on while the members are in the call.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from typing import Any, Callable, Iterable, Iterator, Sequence, Tuple

from ..compat import errors
from ..world import process
from ..world.process_set import joined

# For each trainer the thread that took its last step; None before the first step.
_threads: weakref.WeakKeyDictionary[Any, int | None] = weakref.WeakKeyDictionary()
# For each trainer how to find the ranks that wait in a step of it, and how to refuse that step.
_calls: weakref.WeakKeyDictionary[Any, tuple[Callable, Callable]] = weakref.WeakKeyDictionary()

# Remedies for workers that wait for each other; of circular waits too.
SAVE_TOGETHER = "Call save_states() and load_states() on all workers, not under `if rank == 0:`"
EQUAL_BATCHES = (
    "give all the same number of batches, as a DistributedSampler does, or put `with join(trainer):` around the "
    "training loop"
)
TRAINERS_DIFFER = (
    "the workers make or step their trainers in different orders. Make all trainers, and call step() of each, in the "
    "same order on all workers"
)

_SAVING = f"saving or loading optimizer states, which are divided over the workers. {SAVE_TOGETHER}"

_EQUAL_STEPS = (
    "the workers take different numbers of steps, or not all make this call. Call it on all workers, not under `if "
    f"rank == 0:`; and {EQUAL_BATCHES}."
)

_EQUAL_TRAINERS = f"{TRAINERS_DIFFER}."

_EQUAL_ORDER = "make calls that wait in the same order on all workers, also calls of different process sets."

# For each process set the thread that made its last call that waits.
_callers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

# For each thread the last operation in which it met other ranks: its name, and the user's call.
_met: dict[int, tuple[str, str]] = {}

# Names under which workers save and load optimizer states, with their process sets and the objects that have the names.
_checkpoints: dict[str, tuple[Any, weakref.ref]] = {}


def register(trainer: Any, awaited_by: Callable[[Any], list[int]], refuse: Callable[[Any, str], None]) -> None:
    """Note that there is a trainer.

    Parameters
    ----------
    trainer : gluon.Trainer
    awaited_by : callable
        Given the trainer, returns the ranks that have begun a step that this rank has not begun.
    refuse : callable
        Given the trainer and a reason, lets that step fail on the other ranks.
    """
    _threads[trainer] = None
    _calls[trainer] = (awaited_by, refuse)


def note_step(trainer: Any, awaited_by: Callable[[Any], list[int]], refuse: Callable[[Any, str], None]) -> None:
    """Note that this thread takes a step of a trainer, also of a copy that was not registered; as `register`."""
    _threads[trainer] = threading.get_ident()
    _calls[trainer] = (awaited_by, refuse)


def failed(error: BaseException) -> None:
    """After a failed call that waits: if ranks that save states were the reason, let their save fail too."""
    if errors.code_of(error) != "deadlock":
        return
    with contextlib.suppress(RuntimeError):
        for checkpoint, (process_set, _) in list(_checkpoints.items()):
            if set(_who_waits(checkpoint, process_set)).intersection(error.ranks):
                process_set._core.refuse(checkpoint, str(error))


def _who_waits(name: str, process_set: Any) -> list[int]:
    """The ranks that wait under a name whose turn this rank has not taken."""
    try:
        return process_set._core.waiting_for_this([name])[0]
    except ValueError:  # the set was removed
        return []


def meeting_name(scope: str) -> str:
    """What the workers of a store or trainer are matched by when they save or load optimizer states."""
    return f"{scope}/checkpoint"


def saves_states(owner: Any, scope: str, process_set: Any) -> None:
    """Note that the workers of a process set save and load the optimizer states of a store or trainer together.

    That lasts as long as `owner`, an object that all copies of the store or trainer share.
    """
    name = meeting_name(scope)
    _checkpoints[name] = process_set, weakref.ref(owner, functools.partial(_forget_states, name))


def _forget_states(name: str, owner: weakref.ref) -> None:
    """The owner is gone; since a later init() another object may have the name."""
    if _checkpoints.get(name, (None, None))[1] is owner:
        del _checkpoints[name]


def waiting_name(process_set: Any) -> str:
    """The name by which calls that wait are matched."""
    return f"{process_set._scope}/waiting"


def note_waiting_call(turn: Any) -> None:
    """Note that this thread meets other ranks, maybe in a call that waits."""
    _met[threading.get_ident()] = turn.name, turn.call
    if turn.name == waiting_name(turn.process_set):
        _callers[turn.process_set] = threading.get_ident()


def call_of(thread: int | None, name: str) -> str:
    """The user's call whose ranks a thread meets under this name; empty if it meets them elsewhere or not at all."""
    met, call = _met.get(thread or 0, ("", ""))
    return call if met == name else ""


def look(turn: Any) -> Callable[[], None] | None:
    """Give up a call that waits, on all ranks, if members of its set have begun what this thread begins after the call.

    The call may have succeeded meanwhile. Then the other ranks have gone on, and this rank follows later.

    Parameters
    ----------
    turn : Turn
        The call in which this rank waits.

    Returns
    -------
    callable or None
        Refuses what the other ranks have begun; to be called without arguments if the call fails.
    """
    try:
        members = set(turn.process_set.ranks or ())
        for find in (_steps, _checkpoints_begun, _calls_of_other_sets):
            for ranks, what, refuse in find(turn):
                others = sorted(members.intersection(ranks))
                if others:
                    reason = _reason(turn.call, others, what)
                    turn.core.give_up(turn.name, reason, "deadlock", others)
                    return functools.partial(refuse, reason)
    except RuntimeError:  # the core was shut down, or a rank keeps its table locked
        pass
    return None


# Ranks that have begun something without this thread, what it is, and how to refuse it with a reason.
_Begun = Iterator[Tuple[Iterable[int], str, Callable[[str], None]]]


def _steps(turn: Any) -> _Begun:
    for trainer, thread in list(_threads.items()):
        if not _begins_later(thread):
            continue
        awaited_by, refuse = _calls[trainer]
        try:
            ranks = awaited_by(trainer)
        except ValueError:  # its process set was removed
            continue
        in_step = turn.name != waiting_name(turn.process_set)  # of a trainer, in place of a call of the user
        advice = getattr(trainer, "_when_steps_differ", _EQUAL_TRAINERS if in_step else _EQUAL_STEPS)
        what = f"in a step of a trainer that rank {process.rank()} has not taken: {advice}"
        yield ranks, what, functools.partial(refuse, trainer)


def _checkpoints_begun(turn: Any) -> _Begun:
    for checkpoint, (members, _) in list(_checkpoints.items()) if _is_alone() else ():
        yield _who_waits(checkpoint, members), _SAVING, functools.partial(_refuse, members, checkpoint)


def _calls_of_other_sets(turn: Any) -> _Begun:
    """Ranks that wait for this rank in a call of another set, while this rank waits for them.

    Of two ranks that wait for each other, the lower one gives up its call. If both did, the number of errors would
    depend on who looks first.
    """
    if turn.name != waiting_name(turn.process_set):
        return
    for other in joined():
        if other is turn.process_set or not _begins_later(_callers.get(other)):
            continue
        name = waiting_name(other)
        there = _who_waits(name, other)
        ranks = _missing(turn).intersection(there) if there else set()
        if ranks and process.rank() < min(ranks):
            what = f"in a call of {other!r} that rank {process.rank()} has not made: {_EQUAL_ORDER}"
            yield ranks, what, functools.partial(_refuse, other, name)


def _refuse(process_set: Any, name: str, reason: str) -> None:
    process_set._core.refuse(name, reason)


def _missing(turn: Any) -> set[int]:
    """The ranks that have not reached the call."""
    missing = [set(one[2]) for one in turn.core.waiting(turn.name)]
    return set.intersection(*missing) if missing else set()


def _begins_later(thread: int | None) -> bool:
    """Whether this thread makes the next step or call, after its present call; `thread` made the last (None: none)."""
    return thread == threading.get_ident() or (thread is None and _is_alone())


def _is_alone() -> bool:
    """Whether no other thread of the user can take the steps."""
    return has_no_other_thread(threading.current_thread())


def has_no_other_thread(thread: threading.Thread) -> bool:
    """Whether a thread is the only one that can make calls for the user."""
    return all(one.daemon or one is thread for one in threading.enumerate())


def _reason(call: str, others: Sequence[int], what: str) -> str:
    are = f"rank {others[0]} is" if len(others) == 1 else f"ranks {', '.join(map(str, others))} are"
    return f"rank {process.rank()} is in {call}, but {are} {what}"
