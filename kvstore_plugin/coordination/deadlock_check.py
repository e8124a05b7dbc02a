"""Deadlock check: raises an error unless trainers' steps and blocking calls come in the same order on all ranks.

A worker with less data than the others leaves its training loop and continues with the evaluation. It waits for the
others in, say, barrier(), and they wait for its gradients: a deadlock. So a rank in a long wait asks whether other
ranks have begun a trainer's step that this rank has not begun. If the order is the same on all ranks, no rank has begun
such a step: a rank in a blocking call has begun all steps before the call, and no rank has begun a step after it.

If a rank has begun such a step, all ranks get an error: in the blocking call, and in the gradients of the step. A rank
that has not reached this call gets the same error in its next blocking call. In the same way a waiting rank finds ranks
that save optimizer states without it, and ranks that wait in a call of another process set.

Only members of the call's process set count: other ranks may continue while the members are in the call.
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
# For each trainer, two functions: the first finds the ranks that wait for this rank in a step, the second makes this
# step fail.
_calls: weakref.WeakKeyDictionary[Any, tuple[Callable, Callable]] = weakref.WeakKeyDictionary()

# Remedies for workers that wait for each other, including circular waits.
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

_EQUAL_ORDER = "all workers must make their waiting calls in the same order, including calls of different process sets."

# For each process set the thread of its last blocking call.
_callers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

# For each thread, the name and the user's call of the last operation in which the thread waited for other ranks.
_met: dict[int, tuple[str, str]] = {}

# Names under which workers save and load optimizer states, with their process sets and the objects that have the names.
_checkpoints: dict[str, tuple[Any, weakref.ref]] = {}


def register(trainer: Any, awaited_by: Callable[[Any], list[int]], refuse: Callable[[Any, str], None]) -> None:
    """Register a trainer.

    Parameters
    ----------
    trainer : gluon.Trainer
    awaited_by : callable
        Given the trainer, returns the ranks that have begun a step that this rank has not begun.
    refuse : callable
        Given the trainer and a reason, makes such a step fail on the other ranks.
    """
    _threads[trainer] = None
    _calls[trainer] = (awaited_by, refuse)


def note_step(trainer: Any, awaited_by: Callable[[Any], list[int]], refuse: Callable[[Any, str], None]) -> None:
    """Record that this thread takes a step of a trainer, even of an unregistered copy; arguments as in `register`."""
    _threads[trainer] = threading.get_ident()
    _calls[trainer] = (awaited_by, refuse)


def failed(error: BaseException) -> None:
    """After a failed blocking call: if ranks that save states were the cause, make their save fail too."""
    if errors.code_of(error) != "deadlock":
        return
    with contextlib.suppress(RuntimeError):
        for checkpoint, (process_set, _) in list(_checkpoints.items()):
            if set(_who_waits(checkpoint, process_set)).intersection(error.ranks):
                process_set._core.refuse(checkpoint, str(error))


def _who_waits(name: str, process_set: Any) -> list[int]:
    """The ranks that wait in an operation of this name that this rank has not begun."""
    try:
        return process_set._core.waiting_for_this([name])[0]
    except ValueError:  # the set was removed
        return []


def meeting_name(scope: str) -> str:
    """The name by which the workers of a store or trainer are matched when they save or load optimizer states."""
    return f"{scope}/checkpoint"


def saves_states(owner: Any, scope: str, process_set: Any) -> None:
    """Register a store or trainer whose optimizer states the workers of a process set save and load together.

    Valid for the lifetime of `owner`, an object that all copies of the store or trainer share.
    """
    name = meeting_name(scope)
    _checkpoints[name] = process_set, weakref.ref(owner, functools.partial(_forget_states, name))


def _forget_states(name: str, owner: weakref.ref) -> None:
    """Called when the owner is deleted. Keeps the name if another object has taken it after a later init()."""
    if _checkpoints.get(name, (None, None))[1] is owner:
        del _checkpoints[name]


def waiting_name(process_set: Any) -> str:
    """The name by which blocking calls are matched."""
    return f"{process_set._scope}/waiting"


def note_waiting_call(turn: Any) -> None:
    """Record the turn in which this thread waits for other ranks."""
    _met[threading.get_ident()] = turn.name, turn.call
    if turn.name == waiting_name(turn.process_set):
        _callers[turn.process_set] = threading.get_ident()


def call_of(thread: int | None, name: str) -> str:
    """The last call in which a thread waited for other ranks, if its operation has this name; otherwise empty."""
    met, call = _met.get(thread or 0, ("", ""))
    return call if met == name else ""


def look(turn: Any) -> Callable[[], None] | None:
    """Give up a blocking call on all ranks if members of its set have begun an operation that this thread begins later.

    The call may have succeeded meanwhile. Then the other ranks have continued, and this rank continues too.

    Parameters
    ----------
    turn : Turn
        The call in which this rank waits.

    Returns
    -------
    callable or None
        Refuses the operation that the other ranks have begun; to be called without arguments if the call fails. None if
        the call was not given up.
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


# Ranks that have begun an operation before this thread, the operation's description, and a function that makes it fail.
_Begun = Iterator[Tuple[Iterable[int], str, Callable[[str], None]]]


def _steps(turn: Any) -> _Begun:
    for trainer, thread in list(_threads.items()):
        if not _begins_later(thread):
            continue
        awaited_by, refuse = _calls[trainer]
        try:
            ranks = awaited_by(trainer)
        except ValueError:  # the trainer's process set was removed
            continue
        in_step = turn.name != waiting_name(turn.process_set)  # a blocking call would have this name
        advice = getattr(trainer, "_when_steps_differ", _EQUAL_TRAINERS if in_step else _EQUAL_STEPS)
        what = f"in a step of a trainer that rank {process.rank()} has not taken: {advice}"
        yield ranks, what, functools.partial(refuse, trainer)


def _checkpoints_begun(turn: Any) -> _Begun:
    for checkpoint, (members, _) in list(_checkpoints.items()) if _is_alone() else ():
        yield _who_waits(checkpoint, members), _SAVING, functools.partial(_refuse, members, checkpoint)


def _calls_of_other_sets(turn: Any) -> _Begun:
    """Ranks that wait for this rank in a call of another set, while this rank waits for them.

    If two ranks wait for each other, the lower rank gives up its call. If both did, the number of errors would depend
    on timing.
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
    """The ranks that have not reached the call of this turn."""
    missing = [set(one[2]) for one in turn.core.waiting(turn.name)]
    return set.intersection(*missing) if missing else set()


def _begins_later(thread: int | None) -> bool:
    """Whether this thread, which waits now, will make the next step or call of a kind.

    `thread`: the thread that made the last step or call of this kind; None if there was none.
    """
    return thread == threading.get_ident() or (thread is None and _is_alone())


def _is_alone() -> bool:
    """Whether the current thread is the only thread that can make the user's calls."""
    return has_no_other_thread(threading.current_thread())


def has_no_other_thread(thread: threading.Thread) -> bool:
    """Whether a thread is the only thread that can make the user's calls."""
    return all(one.daemon or one is thread for one in threading.enumerate())


def _reason(call: str, others: Sequence[int], what: str) -> str:
    are = f"rank {others[0]} is" if len(others) == 1 else f"ranks {', '.join(map(str, others))} are"
    return f"rank {process.rank()} is in {call}, but {are} {what}"
