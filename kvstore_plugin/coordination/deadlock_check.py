"""Deadlock check: steps of trainers and calls that wait must come in the same order on all ranks; if not, an error.

A worker with less data than the others leaves its training loop and goes on to the evaluation. It waits for the others
in, say, barrier(), and they wait for its gradients: a deadlock. So a rank that waits for long asks whether other ranks
have begun a step of a trainer that this rank has not begun. If all ranks had the same order, that could not be: a rank
in a call that waits has begun all steps before the call, and no rank has begun a step behind it.

Then all ranks get an error: in the call that waits, and in the gradients of the step. A rank that had not come to this
call gets the same error in its next call that waits. In the same way a rank that waits finds ranks that save the states
of an optimizer without it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from typing import Any, Callable, Sequence

from ..compat import errors
from ..world import process

# For each trainer the thread that took its last step; None before the first step.
_threads: weakref.WeakKeyDictionary[Any, int | None] = weakref.WeakKeyDictionary()
# For each trainer how to find the ranks that wait in a step of it, and how to refuse that step.
_calls: weakref.WeakKeyDictionary[Any, tuple[Callable, Callable]] = weakref.WeakKeyDictionary()

_SAVING = (
    "saving or loading optimizer states, which are divided over the workers. Call save_states() and load_states() on "
    "all workers, not under `if rank == 0:`"
)

_EQUAL_STEPS = (
    "the workers take different numbers of steps. Give all workers the same number of batches, as a DistributedSampler "
    "does, or put `with join(trainer):` around the training loop."
)

# Names under which workers save and load optimizer states, and their process sets.
_checkpoints: dict[str, Any] = {}


def made(trainer: Any, awaited_by: Callable[[Any], list[int]], refuse: Callable[[Any, str], None]) -> None:
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


def stepped(trainer: Any, awaited_by: Callable[[Any], list[int]], refuse: Callable[[Any, str], None]) -> None:
    """Note that this thread takes a step of a trainer, also of a copy that was not passed to `made`; as `made`."""
    _threads[trainer] = threading.get_ident()
    _calls[trainer] = (awaited_by, refuse)


def failed(error: BaseException) -> None:
    """After a failed call that waits: if ranks that save states were the reason, let their save fail too."""
    if errors.code_of(error) != "deadlock":
        return
    with contextlib.suppress(RuntimeError):
        for checkpoint, process_set in list(_checkpoints.items()):
            if set(_who_saves(checkpoint, process_set)).intersection(error.ranks):
                process_set.core.refuse(checkpoint, str(error))


def _who_saves(checkpoint: str, process_set: Any) -> list[int]:
    """The ranks that wait in a checkpoint that this rank has not called."""
    try:
        return process_set.core.waiting_for_this([checkpoint])[0]
    except ValueError:  # the set was removed
        return []


def meeting_name(scope: str) -> str:
    """What the workers of a store or trainer are matched by when they save or load optimizer states."""
    return f"{scope}/checkpoint"


def saves_states(scope: str, process_set: Any) -> None:
    """Note that the workers of a process set save and load the optimizer states of a store or trainer together."""
    _checkpoints[meeting_name(scope)] = process_set


def forget_states(scope: str) -> None:
    """Forget a store or trainer that is gone."""
    _checkpoints.pop(meeting_name(scope), None)


def look(core: Any, name: str, call: str) -> Callable[[], None] | None:
    """Give up a call that waits, on all ranks, if other ranks have begun a step or a save without this thread.

    The call may have succeeded meanwhile. Then the other ranks have gone on, and this rank takes their step later.

    Parameters
    ----------
    core : Group
        The group of the process set in which this rank waits.
    name : str
        The name by which the call is matched.
    call : str
        The call, as the other ranks are told.

    Returns
    -------
    callable or None
        Refuses that step or save; to be called without arguments if the call fails.
    """
    try:
        for trainer, thread in list(_threads.items()):
            if thread != threading.get_ident() and not (thread is None and _is_alone()):
                continue  # another thread may still take the step
            awaited_by, refuse = _calls[trainer]
            try:
                others = awaited_by(trainer)
            except ValueError:  # its process set was removed
                continue
            if others:
                reason = _reason(call, others, getattr(trainer, "_when_steps_differ", _EQUAL_STEPS))
                core.give_up(name, reason, "deadlock", others)
                return functools.partial(refuse, trainer, reason)
        for checkpoint, process_set in list(_checkpoints.items()) if _is_alone() else ():
            others = _who_saves(checkpoint, process_set)
            if others:
                reason = f"rank {process.rank()} is in {call}, but {_ranks(others)} {_SAVING}"
                core.give_up(name, reason, "deadlock", others)
                return functools.partial(process_set.core.refuse, checkpoint, reason)
    except RuntimeError:  # the core was shut down, or a rank keeps its table locked
        pass
    return None


def _is_alone() -> bool:
    """Whether no other thread of the user can take the steps."""
    return all(one.daemon or one is threading.current_thread() for one in threading.enumerate())


def _reason(call: str, others: Sequence[int], advice: str) -> str:
    own = f"rank {process.rank()}"
    return f"{own} is in {call}, but {_ranks(others)} in a step of a trainer that {own} has not taken: {advice}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"
