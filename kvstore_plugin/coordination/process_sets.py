"""Adds and removes process sets on all ranks together, so that all sets have the same numbers on all ranks."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import numpy as np

from ..compat.mxnet import MXNetError
from ..world import gpu_libraries, process, settings
from ..world.process_set import ProcessSet, global_process_set, shown
from . import operation

# The number of a set that is not added.
_NOT_ADDED = -1
# Reasons in errors about a set that has ended.
_SHUT_DOWN = "ended with shutdown(): add it again after init()"
_LOST = "ended when a worker was lost: add a new set with the current ranks"


class _Known(NamedTuple):
    """The record of an added set, on every rank."""

    ranks: tuple[int, ...]
    process_set: ProcessSet | None  # None if only calls of other ranks have added the set


_known: dict[int, _Known] = {}
_next_id = 1


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set. Collective over all ranks, members and others; returns when the set can be used.

    All ranks add their sets in the same order. In one call they may add different sets, as after ``comm.Split``,
    provided that all members of a set add that set.

    Parameters
    ----------
    process_set : ProcessSet, sequence of int, or mpi4py.MPI.Intracomm
        The set, or its ranks or communicator.

    Returns
    -------
    ProcessSet
        `process_set` itself if it is a ProcessSet.

    Raises
    ------
    TypeError, ValueError
        `process_set` is not a set, a rank occurs twice or is out of range, the communicator has processes outside of
        init(), or another set with the same ranks was added before. The call raises an error on the other ranks too.
    MXNetError
        The ranks do not add the same set, or another rank's call has failed.
    RuntimeError
        kvstore_plugin is not initialized.

    Examples
    --------
    >>> first = mykv.add_process_set([0])  # on all ranks, members or not
    >>> if first.included():
    ...     total = mykv.allreduce(mx.np.ones(3), process_set=first)
    """
    with operation.waiting(global_process_set, "add_process_set") as turn:
        if not isinstance(process_set, ProcessSet):
            process_set = ProcessSet(process_set)
        mine = _proposal(process_set)
        positions = np.zeros(process.size(), dtype=np.int64)  # for each member 1 + its rank in the set
        positions[list(mine)] = range(1, len(mine) + 1)
        proposals = _agreed(turn.meet("add_process_set", positions))
    _make(process_set, proposals)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. Collective over all ranks, members and others.

    Waits for this rank's operations in the set, as shutdown() does.

    Parameters
    ----------
    process_set : ProcessSet
        A set that was added. Afterwards it may be added again.

    Returns
    -------
    bool
        Whether the set was removed: False for `global_process_set`, and for a set that is not added.

    Raises
    ------
    TypeError
        `process_set` is not a ProcessSet.
    MXNetError
        The ranks do not remove the same set, or another rank's call has failed.
    RuntimeError
        kvstore_plugin is not initialized.

    Examples
    --------
    >>> first = mykv.add_process_set([0])
    >>> mykv.remove_process_set(first)  # on all ranks
    True
    """
    with operation.waiting(global_process_set, "remove_process_set") as turn:
        if not isinstance(process_set, ProcessSet):
            raise TypeError(f"process_set must be a ProcessSet, not {type(process_set).__name__}.")
        number = _NOT_ADDED if process_set.process_set_id is None else process_set.process_set_id
        proposed = turn.meet("remove_process_set", [number])[:, 0].tolist()
    for proposer, one in enumerate(proposed):
        # Ranks outside the set may remove another set at the same time.
        for member in _known[one].ranks if one in _known else range(process.size()):
            if proposed[member] != one:
                raise MXNetError(
                    f"The ranks do not remove the same process set: rank {proposer} removes {_known_as(one)}, but rank "
                    f"{member} removes {_known_as(proposed[member])}."
                )
    gone = [_known.pop(number) for number in set(proposed) if number in _known]
    for one in gone:
        if one.process_set is not None:
            _end(one.process_set)
    return bool(gone)


class _SetsOfInit(process.Follower):
    def check_sets(self, process_sets: Any) -> None:
        for process_set in _checked(process_sets):
            if process_set.process_set_id is None:
                raise RuntimeError(f"kvstore_plugin is initialized without {process_set!r}: use add_process_set().")

    def add_sets(self, process_sets: Any) -> None:
        """Add the process sets of init(), after a check that all ranks pass the same number of sets."""
        given = _checked(process_sets)
        # Without operation.exchange(): no rank can be waiting in another operation yet.
        counts = np.array([len(given), -len(given)], dtype=np.int64)
        most = np.empty_like(counts)
        process.wait(process.core.submit_allreduce("process sets of init()", [counts], [most], "max"))
        if most[0] != -most[1]:
            raise RuntimeError(
                f"init() must be given the same process sets on all ranks, but the ranks give between {-most[1]} and "
                f"{most[0]} sets, and rank {process.rank()} gives {len(given)}."
            )
        for one in given:
            add_process_set(one)

    def left(self, lost: bool) -> None:
        """Drop all sets except the set of all ranks: the core has ended their runtimes."""
        global _next_id
        for _, process_set in _known.values():
            if process_set is not None:
                process_set._end(_LOST if lost else _SHUT_DOWN)
        _known.clear()
        _next_id = 1


process.follow(_SetsOfInit())


def _checked(process_sets: Any) -> list[ProcessSet]:
    if process_sets is None or process_sets == "dynamic":
        return []
    if not isinstance(process_sets, (list, tuple)):
        raise TypeError(f"process_sets must be a list of ProcessSets, not {process_sets!r}.")
    return [
        process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set) for process_set in process_sets
    ]


def _proposal(process_set: ProcessSet) -> tuple[int, ...]:
    """Global ranks of a set to add, in the set's order; empty for MPI.COMM_NULL."""
    if process_set._is_added():
        raise ValueError(f"{process_set!r} was added already.")
    size = process.size()
    if process_set.mpi_comm is not None:
        return tuple(process.ranks_in(process_set.mpi_comm))
    if process_set.ranks[-1] >= size:
        raise ValueError(f"{process_set!r} has the rank {process_set.ranks[-1]}, but ranks go from 0 to {size - 1}.")
    return tuple(process_set.ranks)


def _agreed(positions: np.ndarray) -> list[tuple[int, ...]]:
    """The sets that the ranks add together, without duplicates.

    Parameters
    ----------
    positions : ndarray of int64, shape (size, size)
        Row r is rank r's proposal: for each member 1 + its rank in the set.
    """
    proposals = [tuple(int(rank) for rank in np.argsort(row) if row[rank]) for row in positions]
    known = {frozenset(known_set.ranks): known_set.ranks for known_set in _known.values()}
    known[frozenset(range(process.size()))] = tuple(range(process.size()))
    for proposer, proposal in enumerate(proposals):
        for member in proposal:
            if proposals[member] != proposal:
                raise MXNetError(
                    f"The ranks do not add the same process set: rank {proposer} adds {_named(proposal)}, but its "
                    f"member rank {member} adds {_named(proposals[member])}."
                )
        if frozenset(proposal) in known:
            what = "all ranks are in global_process_set" if len(proposal) == process.size() else "it was added already"
            raise ValueError(f"{_named(proposal)} cannot be added twice: {what}.")
    return sorted({proposal for proposal in proposals if proposal}, key=min)


def _make(process_set: ProcessSet, proposals: list[tuple[int, ...]]) -> None:
    """Create the groups of the sets that all ranks have agreed on. `process_set`: this rank's set."""
    global _next_id
    mine = _own(process_set, proposals)
    group = None
    try:
        with operation.waiting(global_process_set, "add_process_set") as turn:
            if mine is not None and process.rank() in mine:
                group = _group_of(mine)
            turn.meet("end of add_process_set")
    except BaseException:
        if group is not None:
            group.shutdown()
        raise
    for proposal in proposals:
        if proposal == mine:
            process_set._begin(_next_id, proposal, group)
        _known[_next_id] = _Known(proposal, process_set if proposal == mine else None)
        _next_id += 1


def _own(process_set: ProcessSet, proposals: list[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The proposal with the ranks of `process_set`, this rank's set."""
    if process_set.mpi_comm is None:
        return tuple(process_set.ranks)
    for proposal in proposals:
        if process.rank() in proposal:
            return proposal
    # No proposal has this rank: its `mpi_comm` is MPI.COMM_NULL. It takes the first proposal.
    return proposals[0] if proposals else None


def _group_of(ranks: tuple[int, ...]) -> Any:
    comm = process.communicator_of(ranks)
    try:
        group = process.core.make_group(comm.py2f(), list(ranks), settings.core_options())
    finally:
        comm.Free()
    process.warn_of_rejected_callers(group, f"the ranks of {_named(ranks)}")
    gpu_libraries.log_road_of_set(process.core, group, _named(ranks))
    return group


def _end(process_set: ProcessSet) -> None:
    group = process_set._end("was removed")
    if group is not None:
        process.drain(settings.value("MYKV_EXIT_WAIT_S"))
        group.leave(f"it has removed {process_set!r}")
        group.shutdown()


def _known_as(number: int) -> str:
    if number in _known:
        return _named(_known[number].ranks)
    return "global_process_set" if number == 0 else "a set that is not added"


def _named(ranks: Sequence[int]) -> str:
    return f"ProcessSet({shown(ranks)})"
