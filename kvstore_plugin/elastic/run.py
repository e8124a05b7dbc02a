"""run_elastic: training that goes on with the workers that are left when one has died (docs/elastic.md).

Every worker ends each run of the training function in one agreement of MPI's, which counts the living only: whoever has
returned from it says yes, whoever has lost a worker no. With one no all begin again from the last commit.
"""

from __future__ import annotations

import functools
import logging
import time
from typing import TYPE_CHECKING, Any, Callable

from ..collectives.gather import barrier
from ..compat import errors
from ..compat.mxnet import MXNetError, mx
from ..nn import sync_batch_norm
from ..parameters import check_in_step
from ..world import failure_detector, process
from ..world.process_set import global_process_set
from .state import ElasticState

if TYPE_CHECKING:
    from mpi4py import MPI

_log = logging.getLogger("kvstore_plugin")

# An error of an operation may reach the training function before this worker knows of the death behind it.
_GRACE_S = 2.0


def run_elastic(train: Callable, state: ElasticState | None = None, *arguments: Any, **named: Any) -> Any:
    """Call a training function, and call it again whenever a worker has died, until all that are left have returned.

    Before each call but the first the workers that are left have new ranks, in the same order, and the state is what it
    was at the last commit that all of them have: the function must begin from what the state says. Then the callbacks
    of `ElasticState.register_reset_callbacks` are called. Collective: all workers call it with the same function.

    Errors that have nothing to do with a death are raised, and end the job.

    Parameters
    ----------
    train : callable
        Called as ``train(state, *arguments, **named)``.
    state : ElasticState, optional
        Without it, the result is a function that takes it, so that ``@run_elastic`` can stand above `train`.
    *arguments, **named
        Passed on.

    Returns
    -------
    object
        What `train` has returned.

    Raises
    ------
    RuntimeError
        A worker was lost before the first commit, or with it the states of the optimizer (`ElasticState`).
    """
    if state is None:

        @functools.wraps(train)
        def run(state: ElasticState, *arguments: Any, **named: Any) -> Any:
            return run_elastic(train, state, *arguments, **named)

        return run
    if not isinstance(state, ElasticState):
        raise TypeError(f"state must be an ElasticState, not {type(state).__name__}.")
    state.commit()
    is_new = True
    while True:
        result = None
        try:
            for callback in () if is_new else state._callbacks:
                callback()
            result = train(state, *arguments, **named)
            mx.nd.waitall()
            barrier()
            finished = True
        except (RuntimeError, ValueError, UserWarning) as error:
            if failure_detector.lost(_GRACE_S) is None:
                raise
            _log.info("Training was broken off: %s", error)
            finished = False
        if not finished:
            process.leave_lost()
        finished, comm = _all(process.world_communicator(), finished)
        if finished:
            return result
        _recover(state, comm)
        is_new = False


def _recover(state: ElasticState, comm: MPI.Intracomm) -> None:
    """Join the workers that are left, and bring the state back."""
    began = time.monotonic()
    while True:
        process.leave_lost()
        # From here on nobody writes to memory of the world that was.
        _, comm = _all(comm, True)
        failure = None
        try:
            process.join_again(comm)
            errors.check()  # who was lost while the core began, and did not end with it
            sync_batch_norm.begin_again()
            check_in_step.begin_again()
            state._restore()
            errors.check()
        except Exception as error:
            failure = error
        before = comm.Get_size()
        well, comm = _all(comm, failure is None)
        if well:
            break
        if comm.Get_size() == before:
            raise failure or MXNetError("Another worker could not go on after a worker was lost.")
    seconds = time.monotonic() - began
    left = global_process_set.size()
    _log.warning(
        "mykv goes on with %s after %.2f s; this is rank %d now.",
        f"{left} workers" if left > 1 else "one worker",
        seconds,
        global_process_set.rank(),
    )


def _all(comm: MPI.Intracomm, mine: bool) -> tuple[bool, MPI.Intracomm]:
    """Whether all living workers of a communicator say yes, the same on all of them; and a communicator of these."""
    from mpi4py import MPI

    while True:
        left = comm.Shrink()  # and not Ishrink, which Open MPI 5.0 ends with an internal error
        left.Set_errhandler(MPI.ERRORS_RETURN)
        try:
            return bool(left.Agree(int(mine))), left
        except MPI.Exception:  # one of these has died meanwhile, which all of them get
            comm = left
