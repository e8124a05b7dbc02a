"""run_elastic: training goes on with the remaining workers when a worker has died (docs/elastic.md).

After each run of the training function, the living workers call MPI's fault-tolerant agreement. A worker says yes if
the function has returned, and no if a worker was lost. After a single no all begin again from the last commit.
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

# An operation's error may reach the training function before the failure detector knows of the death that caused it.
_GRACE_S = 2.0


def run_elastic(train: Callable, state: ElasticState | None = None, *arguments: Any, **named: Any) -> Any:
    """Call a training function, and call it again whenever a worker has died, until all remaining workers return.

    Before each call except the first, the remaining workers get new ranks, in the same order, and the state goes back
    to the last commit that all of them have: the function must begin from the state. Then the callbacks of
    `ElasticState.register_reset_callbacks` are called. Collective: all workers call it with the same function.

    Errors that no death has caused are raised, and end the job.

    Parameters
    ----------
    train : callable
        Called as ``train(state, *arguments, **named)``.
    state : ElasticState, optional
        Without a state, the result is a function that takes the state, so that ``@run_elastic`` can decorate `train`.
    *arguments, **named
        Passed to `train`.

    Returns
    -------
    object
        The result of `train`.

    Raises
    ------
    RuntimeError
        A worker was lost before the first commit, or states of the optimizer were lost with it (`ElasticState`).

    Examples
    --------
    >>> def train(state):
    ...     while state.epoch < 3:
    ...         with autograd.record():
    ...             loss = loss_of(net(images), labels)
    ...         loss.backward()
    ...         state.trainer.step(len(images))
    ...         state.epoch += 1
    ...         state.commit()
    >>> trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", elastic=True)
    >>> mykv.run_elastic(train, mykv.ElasticState(net=net, trainer=trainer, epoch=0))
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
            _log.info("Training was interrupted: %s", error)
            finished = False
        if not finished:
            process.leave_lost()
        finished, comm = _all(process.world_communicator(), finished)
        if finished:
            return result
        _recover(state, comm)
        is_new = False


def _recover(state: ElasticState, comm: MPI.Intracomm) -> None:
    """Join the remaining workers, and restore the state."""
    began = time.monotonic()
    while True:
        process.leave_lost()
        # After this agreement no worker writes to memory of the old world.
        _, comm = _all(comm, True)
        failure = None
        try:
            process.join_again(comm)
            errors.check()  # a worker that died while the core started, without an error of the start
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
    """Whether all living workers of a communicator say yes, equal on all of them; and their new communicator."""
    from mpi4py import MPI

    while True:
        left = comm.Shrink()  # not Ishrink: Open MPI 5.0 ends it with an internal error
        left.Set_errhandler(MPI.ERRORS_RETURN)
        try:
            return bool(left.Agree(int(mine))), left
        except MPI.Exception:  # a worker of `left` has died meanwhile; all its workers get this error
            comm = left
