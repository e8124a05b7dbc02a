"""A failed job is started again, up to a number of times, after pauses that grow."""

from __future__ import annotations

from typing import Callable, NamedTuple

from . import workers
from .attempt import Ended
from .signals import EndSignals

VARIABLE = "MYKV_RESTART"  # how often the job of this worker has been started again
_LONGEST_PAUSE_S = 30.0


class Restarts(NamedTuple):
    """How often a failed job is started again at most, and the seconds before the first restart."""

    most: int = 0
    pause: float = 1.0

    def pause_before(self, number: int) -> float:
        """Seconds before restart ``number``, counted from 1. Each pause is twice the one before, up to 30 s."""
        return min(self.pause * 2.0 ** min(number - 1, 32), max(self.pause, _LONGEST_PAUSE_S))


def run_again(start: Callable[[int], Ended], restarts: Restarts, signals: EndSignals) -> int:
    """Run a job until it ends well, or fails and may not be started again, and return its last exit status.

    A job is not started again after a mistake that no restart mends, nor after a signal that has ended it.

    Parameters
    ----------
    start : callable
        Runs the job once. Its argument says how often the job has been started before.
    restarts : Restarts
    signals : EndSignals
    """
    number = 0
    while True:
        ended = start(number)
        if number == restarts.most or not ended.may_mend or signals.received:
            ended.tell(f" It was attempt {number + 1} of {restarts.most + 1}." if number else "")
            return ended.status
        number += 1
        pause = restarts.pause_before(number)
        ended.tell(f" Restart {number} of {restarts.most} begins in {pause:g} s.")
        # A worker that lives on, or a process of a worker, would hold ports, memory and files of the next workers.
        workers.end_orphans()
        signals.wait(pause)
        if signals.received:
            return 128 + signals.received
