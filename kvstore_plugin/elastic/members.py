"""Who takes part in elastic training: the living workers, and with respawn=True new workers for the dead ones."""

from __future__ import annotations

import collections
import contextlib
import logging
import socket
from typing import TYPE_CHECKING, NamedTuple

from ..world import new_workers, process, settings
from ..world.process_set import global_process_set

if TYPE_CHECKING:
    from mpi4py import MPI

_log = logging.getLogger("kvstore_plugin")

# A worker that dies again and again at the same place must not be replaced endlessly.
MOST_ROUNDS = 5


class _Told(NamedTuple):
    """What a worker tells the others before new workers are started."""

    machine: str
    wanted: list[str] | None
    rounds: int


class Members:
    """The workers of a call of run_elastic().

    Attributes
    ----------
    wanted : list of str or None
        The machine of each worker at the beginning, with respawn=True; None otherwise, and in a new worker until the
        others have told it.
    rounds : int
        How often workers were replaced since the last commit of the training function.
    """

    def __init__(self, respawn: bool) -> None:
        self._respawn = respawn
        self.rounds = 0
        self.wanted: list[str] | None = None
        if respawn and not new_workers.is_waiting():
            self.wanted = [process.machine_of(rank) for rank in range(global_process_set.size())]

    def complete(self, comm: MPI.Intracomm) -> MPI.Intracomm:
        """The living workers of a communicator, and new workers after them. Collective over the living workers.

        Raises
        ------
        RuntimeError
            A new worker has not come in time, or workers were replaced too often without a commit.
        """
        _, comm = all_agree(comm, True)
        while self._respawn:
            comm, machines = self._missing(comm)
            if not machines:
                break
            if self.rounds >= MOST_ROUNDS:
                raise RuntimeError(
                    f"Dead workers were replaced {self.rounds} times without a commit in between: training cannot go "
                    "on. The output of the workers that died shows why; a commit after fewer steps may help."
                )
            self.rounds += 1
            joined, comm = self._joined(comm, machines)
            if joined is not None:
                return joined
        return comm

    def _missing(self, comm: MPI.Intracomm) -> tuple[MPI.Intracomm, list[str]]:
        """The living workers, and the machine of each worker that is missing."""
        from mpi4py import MPI

        while True:
            told: list[_Told] = []
            with contextlib.suppress(MPI.Exception):  # a worker has died
                told = comm.allgather(_Told(socket.gethostname(), self.wanted, self.rounds))
            size = comm.Get_size()
            are_told, comm = all_agree(comm, bool(told))
            if are_told and comm.Get_size() == size:
                break
        self.wanted = next((one.wanted for one in told if one.wanted is not None), None)
        self.rounds = max(one.rounds for one in told)
        if self.wanted is None:
            raise RuntimeError("All workers that had the state of the training have died.")
        left = collections.Counter(self.wanted) - collections.Counter(one.machine for one in told)
        return comm, sorted(left.elements())[: max(0, len(self.wanted) - size)]

    def _joined(self, comm: MPI.Intracomm, machines: list[str]) -> tuple[MPI.Intracomm | None, MPI.Intracomm]:
        """Start new workers; the communicator of all workers or None if a worker has died, and the living."""
        count, size = len(machines), comm.Get_size()
        if comm.Get_rank() == 0:
            _log.warning(
                "mykv starts %s to replace the workers that died.", f"{count} workers" if count > 1 else "a worker"
            )
        several = len(set(self.wanted or ())) > 1
        new = new_workers.started(comm, machines if several else [], count)
        are_started, comm = all_agree(comm, new is not None)
        if new is None or not are_started:
            if new is not None:
                new.give_up()
            return None, comm
        late, here = None, False
        try:
            here = new.await_here(settings.value("MYKV_RESPAWN_WAIT_S"))
        except new_workers.NotReached as error:
            late = error
        in_time, comm = all_agree(comm, late is None)
        if not in_time:
            if late is not None:
                _log.error("%s", late)
                new.kill()
            raise late or RuntimeError("Another worker has waited too long for a new worker.")
        here, comm = all_agree(comm, here)
        full = new.merged() if here and comm.Get_size() == size else None
        merged, comm = all_agree(comm, full is not None)
        if not merged or comm.Get_size() < size:
            new.give_up()
            return None, comm
        new.go()
        return full, comm


def all_agree(comm: MPI.Intracomm, mine: bool) -> tuple[bool, MPI.Intracomm]:
    """Whether all living workers of a communicator say yes, equal on all of them; and their new communicator."""
    from mpi4py import MPI

    while True:
        left = comm.Shrink()  # not Ishrink: Open MPI 5.0 ends it with an internal error
        left.Set_errhandler(MPI.ERRORS_RETURN)
        try:
            return bool(left.Agree(int(mine))), left
        except MPI.Exception:  # a worker of `left` has died meanwhile; all its workers get this error
            comm = left
