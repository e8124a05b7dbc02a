"""The members of elastic training: the living workers, and new workers.

With respawn=True new workers replace dead workers. With grow_to=N workers are added if there is room (room.py): then
commit() raises `MoreWorkers` on all workers, which restart from that commit, as after a death.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import socket
from typing import TYPE_CHECKING, NamedTuple

from ..world import new_workers, process, settings
from ..world.process_set import global_process_set
from .room import Growth, Room

if TYPE_CHECKING:
    from mpi4py import MPI

_log = logging.getLogger("kvstore_plugin")

# A worker that dies repeatedly at the same place must not be replaced forever.
MOST_ROUNDS = 5
# Processes of a second MPI_Comm_spawn cannot reach each other (opal_modex_recv fails with -46), even in a minimal MPI
# program.
_ONCE = "Open MPI starts new workers over several machines only once in a job, so no more workers join it."


class MoreWorkers(RuntimeError):
    """Raised on all workers after a commit, since there is room for more workers."""


class Memory(NamedTuple):
    """The state of the group of workers, equal on all workers.

    Attributes
    ----------
    wanted : tuple of str or None
        With respawn=True, the machine of each worker that the job should have. None without respawn, and in a new
        worker until it gets the value of the other workers.
    rounds : int
        Number of times that workers were replaced since the last commit of the training function.
    joins : int
        Number of times that new workers have joined the job.
    """

    wanted: tuple[str, ...] | None = None
    rounds: int = 0
    joins: int = 0


class _Told(NamedTuple):
    """A worker's message to the other workers before new workers are started."""

    machine: str
    memory: Memory
    growth: Growth | None


class Members:
    """The workers of a call of run_elastic()."""

    def __init__(self, respawn: bool, room: Room | None = None) -> None:
        self.respawn = respawn
        self._room = room
        self._growth: Growth | None = None  # room found by rank 0, until new workers are started
        self.memory = Memory()
        if respawn and not new_workers.is_waiting():
            self.memory = Memory(_machines())

    def look_for_room(self) -> bool:
        """On rank 0, whether it should add workers now; False on the other ranks."""
        if self._room is None or global_process_set.rank() != 0:
            return False
        self._growth = self._room.growth(global_process_set.size())
        if self._growth is None:
            return False
        if self.memory.joins > 0 and {*_machines(), self._growth.machine} != {socket.gethostname()}:
            _log.warning(_ONCE)
            self._room.failed()
            return False
        return True

    def committed(self) -> None:
        """Called after each commit of the training function."""
        self.memory = self.memory._replace(rounds=0)

    def completed(self) -> None:
        """Called when training continues with the current workers: added workers become part of `Memory.wanted`."""
        if self.respawn and global_process_set.size() > len(self.memory.wanted or ()):
            self.memory = self.memory._replace(wanted=_machines())

    def complete(self, comm: MPI.Intracomm, is_new: bool = False) -> MPI.Intracomm:
        """Return a communicator of the living workers, followed by new workers. Collective over the living workers.

        A new worker that has joined calls it too, with `is_new`, since more workers may join.

        Raises
        ------
        RuntimeError
            The replacement of a dead worker has not arrived in time, workers were replaced too often without a commit,
            or all workers with the state of the training have died.
        """
        if not is_new:
            _, comm = all_agree(comm, True)
        is_counted = is_new
        while self.respawn:
            comm, machines, one_by_one = self._missing(comm)
            growth, self._growth = self._growth, None  # after a death, the next commit checks again
            if machines:
                if not is_counted:
                    self._count_round()
                joined, comm = self._replaced(comm, machines[:1] if one_by_one else machines, one_by_one)
                is_counted = joined is not None
            elif growth is not None:
                count = 1 if one_by_one else growth.count
                joined, comm = self._grown(comm, growth._replace(count=count), one_by_one)
                if joined is not None and count < growth.count:
                    self._growth = growth._replace(count=growth.count - count)
            else:
                break
            comm = comm if joined is None else joined
        return comm

    def _count_round(self) -> None:
        rounds = self.memory.rounds
        if rounds >= MOST_ROUNDS:
            raise RuntimeError(
                f"Dead workers were replaced {rounds} times without a commit in between: training cannot go on. The "
                "output of the workers that died shows why; a commit after fewer steps may help."
            )
        self.memory = self.memory._replace(rounds=rounds + 1)

    def _missing(self, comm: MPI.Intracomm) -> tuple[MPI.Intracomm, list[str], bool]:
        """The living workers, the machine of each worker that is missing, and whether to start them one by one.

        When a process dies, Open MPI's launcher ends all processes that were started together with it. So if all
        workers are on one machine, new workers are started one by one.
        """
        from mpi4py import MPI

        while True:
            told: list[_Told] = []
            with contextlib.suppress(MPI.Exception):  # a worker has died
                told = comm.allgather(_Told(socket.gethostname(), self.memory, self._growth))
            size = comm.Get_size()
            are_told, comm = all_agree(comm, bool(told))
            if are_told and comm.Get_size() == size:
                break
        memory = next((one.memory for one in told if one.memory.wanted is not None), None)
        if memory is None or memory.wanted is None:
            raise RuntimeError("All workers that had the state of the training have died.")
        present = tuple(one.machine for one in told)
        several = len({*present, *memory.wanted}) > 1
        if several and memory.joins > 0 and size < len(memory.wanted):
            if comm.Get_rank() == 0:
                _log.warning(_ONCE)
            memory = memory._replace(wanted=present)
        self.memory = memory._replace(rounds=max(one.memory.rounds for one in told))
        self._growth = next((one.growth for one in told if one.growth is not None), None)
        left = collections.Counter(memory.wanted) - collections.Counter(present)
        several = several or (self._growth is not None and self._growth.machine != present[0])
        return comm, sorted(left.elements())[: max(0, len(memory.wanted) - size)], not several

    def _grown(
        self, comm: MPI.Intracomm, growth: Growth, one_by_one: bool
    ) -> tuple[MPI.Intracomm | None, MPI.Intracomm]:
        """Add workers.

        Returns the communicator of all workers, or None if no worker was added, and the communicator of the living
        workers.
        """
        if comm.Get_rank() == 0:
            _log.warning("mykv adds %s, since there is room.", _workers(growth.count))
        hosts = "" if one_by_one else growth.hosts
        joined, comm = self._started(comm, growth.count, hosts, is_known=one_by_one, grows=True)
        if joined is None and self._room is not None:
            self._room.failed()
            if comm.Get_rank() == 0:
                _log.warning("mykv could not add workers: training goes on without them.")
        return joined, comm

    def _replaced(
        self, comm: MPI.Intracomm, machines: list[str], one_by_one: bool
    ) -> tuple[MPI.Intracomm | None, MPI.Intracomm]:
        """Replace dead workers.

        Returns the communicator of all workers, or None if a worker has died, and the communicator of the living
        workers.
        """
        if comm.Get_rank() == 0:
            _log.warning("mykv starts %s to replace the workers that died.", _workers(len(machines)))
        if one_by_one:
            return self._started(comm, 1, "")
        hosts = ",".join(f"{machine}:{count}" for machine, count in collections.Counter(machines).items())
        return self._started(comm, len(machines), hosts)

    def _started(
        self, comm: MPI.Intracomm, count: int, hosts: str, is_known: bool = True, grows: bool = False
    ) -> tuple[MPI.Intracomm | None, MPI.Intracomm]:
        """Start new workers.

        Returns the communicator of all workers, or None if a worker has died or, with `grows`, a new worker is late,
        and the communicator of the living workers.
        """
        size = comm.Get_size()
        new = new_workers.started(comm, count, hosts, is_known)
        are_started, comm = all_agree(comm, new is not None)
        if new is None or not are_started:
            if new is not None:
                new.dismiss()
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
            if grows:
                new.dismiss()
                return None, comm
            if late is not None:
                new.kill()
            raise late or RuntimeError("Another worker has waited too long for a new worker.")
        here, comm = all_agree(comm, here)
        full = new.merged() if here and comm.Get_size() == size else None
        merged, comm = all_agree(comm, full is not None)
        if not merged or comm.Get_size() < size:
            new.dismiss()
            return None, comm
        new.go()
        self.memory = self.memory._replace(joins=self.memory.joins + 1)
        return full, comm


def _machines() -> tuple[str, ...]:
    return tuple(process.machine_of(rank) for rank in range(global_process_set.size()))


def _workers(count: int) -> str:
    return f"{count} workers" if count > 1 else "a worker"


def all_agree(comm: MPI.Intracomm, mine: bool) -> tuple[bool, MPI.Intracomm]:
    """Let the living workers of a communicator vote.

    Returns whether all living workers voted yes, the same on all of them, and a new communicator of these workers.
    """
    from mpi4py import MPI

    while True:
        left = comm.Shrink()  # not Ishrink: Open MPI 5.0 ends it with an internal error
        left.Set_errhandler(MPI.ERRORS_RETURN)
        try:
            return bool(left.Agree(int(mine))), left
        except MPI.Exception:  # a worker of `left` has died meanwhile; all its workers get this error
            comm = left
