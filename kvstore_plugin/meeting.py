"""Calls of all workers in which some may be missing: they wait for each other for a limited time.

``if rank == 0: trainer.save_states(...)`` is easily written, and the other workers go on to the next step, where they
wait for that one. So it gives its call up after a while, with an error that names the others. A call that was given up
counts for nobody: a worker that comes later takes part in the next one.
"""

from __future__ import annotations

import re
from typing import Any, Sequence

import numpy as np

from . import process, turns
from .mxnet_compat import MXNetError
from .process_set import ProcessSet

_LOOK_S = 0.2
_GIVEN_UP = re.compile(r"was given up by rank \d+ .*not called it: \[([\d, ]*)\]", re.DOTALL)


def meet(
    process_set: ProcessSet, name: str, call: str, label: str, numbers: Sequence[int], seconds: float
) -> np.ndarray:
    """Wait for the other workers, which show each other some numbers.

    Parameters
    ----------
    process_set : ProcessSet
        Whose workers take part.
    name : str
        What they are matched by.
    call : str
        For errors.
    label : str
        Must be the same on all workers.
    numbers : sequence of int
        Equally many on all workers, of 64 bits.
    seconds : float
        How long to wait for workers that do not come.

    Returns
    -------
    ndarray of int64, shape (size, len(numbers))
        Row r is what rank r of the process set has passed.

    Raises
    ------
    MXNetError
        Workers are missing after that time; or they differ in `label`, have refused or left.
    """
    core = process_set.core
    rows = np.zeros((core.size(), len(numbers)), dtype=np.int64)
    rows[core.rank()] = numbers
    while True:
        result = np.empty_like(rows)
        with turns.Turn(process_set, name, call) as turn:
            work = turn.submit(core.submit_allreduce, [rows], [result], label=label)
        try:
            _wait(core, work, name, call, seconds)
        except MXNetError as error:
            given_up = _GIVEN_UP.search(str(error))
            if given_up and str(process.rank()) in given_up.group(1).split(", "):
                continue  # before this worker came
            raise
        return result


def _wait(core: Any, work: Any, name: str, call: str, seconds: float) -> None:
    waited = 0.0
    while True:
        try:
            if work.wait(_LOOK_S):
                return
        except RuntimeError as error:
            raise MXNetError(str(error)) from None
        except BaseException:  # Ctrl-C
            process.keep(work)
            raise
        waited += _LOOK_S
        if waited < seconds:
            continue
        waited = 0.0
        missing = sorted({rank for one in core.waiting(name) for rank in one[2]})
        if missing:
            # From here on nobody is waited for: the core ends the call on all workers, if it does not succeed now.
            core.give_up(
                name,
                f"{call} was given up by rank {process.rank()} after {seconds:g} s (MYKV_CHECKPOINT_WAIT_S), since "
                f"these ranks had not called it: {missing}",
            )
