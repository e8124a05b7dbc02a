"""Restarts a failed job, up to a number of times, after growing pauses."""

from __future__ import annotations

from typing import Callable, NamedTuple

from . import workers
from .attempt import Ended
from .signals import EndSignals

VARIABLE = "MYKV_RESTART"  # number of restarts of this worker's job
_LONGEST_PAUSE_S = 30.0


class Restarts(NamedTuple):
    """The maximum number of restarts, and the seconds before the first."""

    most: int = 0
    pause: float = 1.0

    def pause_before(self, number: int) -> float:
        """Seconds before restart ``number``, counted from 1. Each pause is twice the previous one, up to 30 s."""
        return min(self.pause * 2.0 ** min(number - 1, 32), max(self.pause, _LONGEST_PAUSE_S))


def run_again(start: Callable[[int], Ended], restarts: Restarts, signals: EndSignals) -> int:
    """Run a job until it succeeds, or fails and may not be restarted, and return its last exit status.

    A job is not restarted after a mistake that a restart cannot fix, or after a signal to mykvrun.

    Parameters
    ----------
    start : callable
        Runs the job once. Its argument is the number of earlier starts.
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
        # A surviving worker, or a process of a worker, would hold ports, memory and files that the next workers need.
        workers.end_orphans()
        signals.wait(pause)
        if signals.received:
            return 128 + signals.received
