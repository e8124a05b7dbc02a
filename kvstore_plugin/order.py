"""Steps of trainers and calls that wait for other ranks come in the same order on all ranks; where not, an error.

A worker that has less data than the others leaves its training loop and goes on to the evaluation. There it waits for
the others, and these for its part in their step: nobody would ever go on. So a rank that waits for long looks whether
others have begun a step of a trainer that it has not called for. Where the order is the same on all ranks, that cannot
be: who is in a call that waits has called for all steps before it, and nobody has called for those behind it.

All of them get an error then: in the call that waits, and in the gradients of the step. The next call that waits of a
rank that had not come to this one fails for the same reason.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Sequence

from . import process

# DistributedTrainers, with the threads that have taken their last steps; None before the first.
_threads: weakref.WeakKeyDictionary[Any, int | None] = weakref.WeakKeyDictionary()


def made(trainer: Any) -> None:
    """Note that there is a trainer."""
    _threads[trainer] = None


def stepped(trainer: Any) -> None:
    """Note that this thread takes a step of a trainer."""
    _threads[trainer] = threading.get_ident()


def look(core: Any, name: str, call: str) -> None:
    """Give a call that waits up, on all ranks, if others have begun a step that this thread has not called for.

    Parameters
    ----------
    core : Group
        Of the process set in which this rank waits.
    name : str
        What the ranks are matched by in it.
    call : str
        What the ranks are told about it.
    """
    try:
        for trainer, thread in list(_threads.items()):
            if thread != threading.get_ident() and not (thread is None and _is_alone()):
                continue  # another thread may still take the step
            for gradients in trainer._gradients:
                others = gradients.awaited_by()
                if others:
                    reason = _reason(call, others)
                    for one in trainer._gradients:
                        one.refuse(reason)
                    core.give_up(name, reason)
                    return
    except RuntimeError:  # of the core, which was shut down, or whose table a rank keeps locked
        return


def _is_alone() -> bool:
    """Whether no other thread can be meant to take a step."""
    return all(one.daemon or one is threading.current_thread() for one in threading.enumerate())


def _reason(call: str, others: Sequence[int]) -> str:
    names = f"rank {others[0]} is" if len(others) == 1 else f"ranks {', '.join(map(str, others))} are"
    return (
        f"rank {process.rank()} is in {call}, but {names} in a step of a trainer that it has not taken: the workers "
        "take different numbers of steps. Give all equally many batches, as a DistributedSampler does, or put `with "
        "join(trainer):` around the training loop."
    )
