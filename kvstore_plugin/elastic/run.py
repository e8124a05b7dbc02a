"""run_elastic: training continues with the remaining workers when a worker has died (docs/elastic.md).

After each run of the training function, the living workers call MPI's fault-tolerant agreement. A worker votes yes if
the function has returned, and no if a worker was lost. If any worker votes no, all restart from the last commit.
"""

from __future__ import annotations

import functools
import logging
import numbers
import time
from typing import TYPE_CHECKING, Any, Callable

from ..collectives.gather import barrier
from ..compat import errors
from ..compat.mxnet import MXNetError, mx
from ..nn import batch_norm_calls
from ..parameters import check_in_step
from ..world import failure_detector, new_workers, process, script_end
from ..world.process_set import global_process_set
from .members import Members, MoreWorkers, all_agree
from .room import Room
from .state import ElasticState

if TYPE_CHECKING:
    from mpi4py import MPI

_log = logging.getLogger("kvstore_plugin")

# An operation's error may reach the training function before the failure detector knows of the death that caused it.
_GRACE_S = 2.0

_has_respawned = False  # run_elastic(respawn=True) was called


def run_elastic(
    train: Callable,
    state: ElasticState | None = None,
    *arguments: Any,
    respawn: bool = False,
    grow_to: int | None = None,
    hostfile: str | None = None,
    **named: Any,
) -> Any:
    """Call a training function, and again after each death of a worker, until it returns on all remaining workers.

    Before each call except the first, the remaining workers get new ranks, in the same order, and the state is restored
    to the last commit that all of them have: the function must start from the state. Then the callbacks of
    `ElasticState.register_reset_callbacks` are called. Collective: all workers call it with the same function.

    Errors not caused by a death are raised, and end the job.

    Parameters
    ----------
    train : callable
        Called as ``train(state, *arguments, **named)``.
    state : ElasticState, optional
        Without a state, the result is a function that takes the state, so that ``@run_elastic`` can decorate `train`.
    *arguments, **named
        Passed to `train`.
    respawn : bool, optional
        Start a new worker for each dead worker, on the same machine if possible; this needs no free slot. The new
        worker's script runs from its beginning, alone (`is_respawned`), up to this call. In this call the new worker
        gets the state from the other workers, and training continues with as many workers as at the beginning. Needs
        Open MPI 5, and a job that was started with ``mykvrun --elastic`` (``mpirun --with-ft ulfm``).
    grow_to : int, optional
        Workers are also added, up to this number, if there is room. Rank 0 checks for room in commits, at most once a
        second. Training continues from that commit with the added workers. Includes respawn=True.
    hostfile : str, optional
        A file that lists all hosts of the job, ``name slots=4`` in each line, as for mpirun. It may change, or be
        created, while the job runs. If None, the room is the slots that the launcher had free when the job began.

    Returns
    -------
    object
        The result of `train`.

    Raises
    ------
    TypeError
        With `respawn`: a value of the ElasticState, or a setting of an optimizer, cannot be pickled.
    RuntimeError
        A worker was lost before the first commit, or its optimizer states were lost with it (`ElasticState`). With
        `respawn`: the job cannot start new workers, a new worker has not arrived in time (MYKV_RESPAWN_WAIT_S), or
        workers died several times without a commit in between.

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
    room = None
    if grow_to is not None or hostfile is not None:
        process.require()
        room, respawn = _checked_room(grow_to, hostfile), True
    if respawn:
        process.require()
        new_workers.check_possible()
    if state is None:

        @functools.wraps(train)
        def run(state: ElasticState, *arguments: Any, **named: Any) -> Any:
            more = {"respawn": respawn, "grow_to": grow_to, "hostfile": hostfile}
            return run_elastic(train, state, *arguments, **more, **named)

        return run
    if not isinstance(state, ElasticState):
        raise TypeError(f"state must be an ElasticState, not {type(state).__name__}.")
    _count_call(respawn)
    members = Members(respawn, room)
    if new_workers.is_waiting():
        if not respawn:
            raise RuntimeError("This process replaces another worker, so run_elastic() needs respawn=True here too.")
        mx.nd.waitall()
        process.leave_lost()
        state._members = members
        _recover(state, new_workers.join(), members, is_new=True)
        at_start = False
    else:
        state.commit()
        state._members = members
        at_start = True
    return _train_until_all_return(train, state, members, at_start, arguments, named)


def _train_until_all_return(
    train: Callable, state: ElasticState, members: Members, at_start: bool, arguments: tuple, named: dict
) -> Any:
    """Call the training function until it has returned on all workers.

    `at_start`: training has just begun, so the reset callbacks are not called before the first call.
    """
    while True:
        result = None
        try:
            if at_start and members.respawn:
                state._check_handover()
            for callback in () if at_start else state._callbacks:
                callback()
            result = train(state, *arguments, **named)
            mx.nd.waitall()
            barrier()
            finished = True
        except MoreWorkers as growth:
            # All workers have completed this commit, so all of them leave the current world after the agreement.
            _log.info("%s", growth)
            finished = False
        except (RuntimeError, ValueError, UserWarning) as error:
            # If another worker's script has raised an exception, the job ends. That worker is not considered dead,
            # although its process may already have ended.
            if script_end.is_of_another(error) or failure_detector.lost(_GRACE_S) is None:
                raise
            _log.info("Training was interrupted: %s", error)
            finished = False
            process.leave_lost()
        finished, comm = all_agree(process.world_communicator(), finished)
        if finished:
            return result
        _recover(state, comm, members)
        at_start = False


def _checked_room(grow_to: int | None, hostfile: str | None) -> Room:
    if grow_to is None:
        raise ValueError("run_elastic(hostfile=...) needs grow_to=, the number of workers that the job may have.")
    if isinstance(grow_to, bool) or not isinstance(grow_to, numbers.Integral):
        raise TypeError(f"grow_to must be an integer, not {grow_to!r}.")
    if grow_to < global_process_set.size():
        raise ValueError(f"grow_to must be at least the {global_process_set.size()} workers of the job, not {grow_to}.")
    return Room(int(grow_to), hostfile)


def _count_call(respawn: bool) -> None:
    global _has_respawned
    if respawn and _has_respawned:
        raise RuntimeError(
            "run_elastic(respawn=True) can be called once in a job, since a new worker joins the others in its first "
            "call. Put the whole training into one call."
        )
    _has_respawned = _has_respawned or respawn


def _recover(state: ElasticState, comm: MPI.Intracomm, members: Members, is_new: bool = False) -> None:
    """Join the remaining workers, and new workers, and restore the state. `is_new`: this worker is a new one."""
    began = time.monotonic()
    while True:
        process.leave_lost()
        # complete() begins with an agreement of the living workers. After the agreement no worker writes to the shared
        # memory of the old world.
        comm, is_new = members.complete(comm, is_new), False
        failure = None
        try:
            process.join_again(comm)
            errors.check()  # a worker may have died while the core started, although join_again() raised nothing
            batch_norm_calls.begin_again()
            check_in_step.begin_again()
            state._restore()
            errors.check()
        except Exception as error:
            failure = error
        before = comm.Get_size()
        well, comm = all_agree(comm, failure is None)
        if well:
            break
        if comm.Get_size() == before:
            raise failure or MXNetError("Another worker could not go on after a worker was lost.")
    members.completed()
    seconds = time.monotonic() - began
    left = global_process_set.size()
    _log.warning(
        "mykv goes on with %s after %.2f s; this is rank %d now.",
        f"{left} workers" if left > 1 else "one worker",
        seconds,
        global_process_set.rank(),
    )
