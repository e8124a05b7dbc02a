"""A rank that runs random programs in which ranks leave, fail or are stopped.

``program_leave FIRST COUNT SECONDS HOSTS VIRTUAL``: VIRTUAL is 1 if the hosts are not virtual.

Each program has its own world. In it all ranks start the same operations, in another order each, and up to two
things happen at random moments (`Happening`). Each operation must end right, or with an error that names a rank that
has gone; where one has gone, within 15 s after the last start, stop or departure.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

from compiled import core, testing
from mpi4py import MPI

from .drawing import Operation
from .happenings import CAUSES, Happening, program
from .job import say
from .program_core import Started, wrong_values

_LIMIT = 15.0  # seconds from the last thing that happened to the end of each operation
_HUNG = 60.0  # seconds after which a job is ended
_BUFFER_BYTES = 8 << 20
_PATTERN = 0x55
_OWN = ["this rank has left: ", "this rank has shut mykv down", "the buffer is of a runtime that was shut down"]


class _World:
    """One program's ranks; looks like `program_core.Groups` to operations."""

    def __init__(self, virtual: int, fan_out: int) -> None:
        options = {"virtual_hosts": virtual, "compress_bytes": 0, "part_bytes": 1 << 18, "fan_out": fan_out}
        options["exchange"] = "grid" if fan_out == 1 else "direct"  # in a chain of hosts all roads for many hosts
        core.init(MPI.COMM_WORLD.py2f(), options)
        self.groups = [core.world()]
        self.buffers = [core.allocate(_BUFFER_BYTES)]


class _Rank:
    """This process's view of its current program."""

    def __init__(self, hosts: int, virtual: int) -> None:
        self.comm, self.hosts, self._virtual = MPI.COMM_WORLD, hosts, virtual
        self.rank, self.size = self.comm.rank, self.comm.size
        # More than once, since a rank that waits for the table's lock may be stopped after the first one.
        waking = f"for pause in $seconds 2 4; do sleep $pause; kill -CONT {os.getpid()}; done"
        script = f"while read seconds; do ({waking}) & done; wait"
        self._waker = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, text=True)

    def end(self) -> None:
        """Let the waker end."""
        self._waker.stdin.close()
        self._waker.wait()

    def meet(self) -> None:
        """A sleeping barrier; ends the job if ranks do not arrive."""
        request, limit = self.comm.Ibarrier(), time.monotonic() + 2 * _HUNG
        while not request.Test():
            time.sleep(0.002)
            if time.monotonic() > limit:
                say("FAILED hang: ranks do not come to the end of a program")
                self.comm.Abort(3)

    def run(self, seed: int) -> tuple[list[str], float, float]:
        """Run one program; returns the errors, the time of the last event, and the time at which the last operation
        ended.

        If no rank leaves there is no time limit, since the speed depends on the machine.
        """
        operations, happenings = program(seed, self.size, self.hosts)
        world = _World(self._virtual, seed // 3 % 2 * 15 + 1)  # a chain of hosts, or all below rank 0
        order = list(range(len(operations)))
        random.Random(seed * 5 + self.rank).shuffle(order)
        order = _keep_turns(operations, order)
        offsets, end = [], 0
        for one in operations:
            offsets.append(end)
            end += -(-one.count * 8 // 64) * 64 if one.kind in ("bucket", "owners") else 0
        if end > _BUFFER_BYTES:
            raise RuntimeError(f"the buckets of program {seed} take {end} bytes")
        mine = [one for one in happenings if one.rank == self.rank]
        started: dict[int, Started | str] = {}
        last = 0.0
        for at in range(len(order) + 1):
            for one in mine:
                if one.at == at:
                    self._happen(one, world)
                    last = time.monotonic()
            if at < len(order):
                number = order[at]
                try:
                    started[number] = Started(world, operations[number], operations[number], offsets[number])
                except core.Error as error:
                    started[number] = str(error)
        last = max(last, time.monotonic())
        where = f"program {seed}, rank {self.rank}, {happenings}"
        problems = []
        failed = []
        for number in range(len(operations)):
            problems += self._check(operations[number], started[number], happenings, failed, where)
        ended = time.monotonic()
        if seed % 2:
            core.shutdown()  # as programs end: each rank when it is through
            ended = time.monotonic()
        self.meet()
        for fault in ("mpi", "memory", "message"):
            testing.plant(fault, 0)
        core.shutdown()
        if not any(one.stops for one in happenings):  # else it may have been stopped in the middle of a write
            late = sum(bool((result.view("uint8") != _PATTERN).any()) for result in failed)
            problems += [f"written after its end: {late} arrays: {where}"] if late else []
        return problems, last, ended

    def _happen(self, one: Happening, world: _World) -> None:
        time.sleep(one.wait)
        group = world.groups[0]
        if one.what in ("leaves", "raises"):
            group.leave(CAUSES[one.what])
        elif not one.stops:
            testing.plant(one.what, one.chances)
        else:
            self._waker.stdin.write(f"{one.lasts:.3f}\n")
            self._waker.stdin.flush()
            if one.what == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
                return
            try:
                testing.signal_under_lock(group, signal.SIGSTOP)
            except core.Error:
                # The others have given the table up meanwhile; or it was before, and nobody was stopped.
                time.sleep(one.lasts)

    def _check(
        self, one: Operation, started: Started | str, happenings: list[Happening], failed: list, where: str
    ) -> list[str]:
        if isinstance(started, str):
            return _wrong_error(started, self.rank, happenings, f"{one}: {where}")
        try:
            if not started.work.wait(_HUNG):
                say(f"FAILED hang: operation {one}: {where}")
                self.comm.Abort(3)
        except core.Error as error:
            for result in started.results:
                if result.flags.c_contiguous and result.size:
                    flat = result.reshape(-1).view("uint8")
                    flat[:] = _PATTERN  # the memory is the program's again
                    failed.append(flat)
            return _wrong_error(str(error), self.rank, happenings, f"{one}: {where}")
        wrong = wrong_values(one, started, self.rank, self.size)
        return [f"wrong: {wrong}: {one}: {where}"] if wrong else []


def _wrong_error(error: str, me: int, happenings: list[Happening], where: str) -> list[str]:
    """An error must name a rank that has gone, or that kept its host's table locked while others went."""
    for one in happenings:
        if one.stops:
            gone = any(not other.stops for other in happenings)
            if "locked" in one.what and gone and f"kept locked by rank {one.rank}," in error:
                return []
            continue
        if CAUSES[one.what] in error and (f"rank {one.rank} has left: " in error or one.rank == me):
            return []
        if one.rank == me and any(words in error for words in _OWN):
            return []
    return [f"the error names no rank that has gone: {error}: {where}"]


def _keep_turns(operations: list[Operation], order: list[int]) -> list[int]:
    """The same order, in which what has one name stays in its own."""
    queues: dict[str, list[int]] = {}
    for number in sorted(order):
        queues.setdefault(operations[number].name, []).append(number)
    return [queues[operations[number].name].pop(0) for number in order]


def main() -> None:
    first, count = int(sys.argv[1]), int(sys.argv[2])
    end = time.monotonic() + float(sys.argv[3])
    me = _Rank(int(sys.argv[4]), int(sys.argv[5]))
    done = failures = 0
    slowest = 0.0
    for seed in range(first, first + count):
        if not me.comm.bcast(time.monotonic() < end):
            break
        facts = me.comm.allgather(me.run(seed))
        after = max(ended for _, _, ended in facts) - max(last for _, last, _ in facts)
        problems = [one for wrong, _, _ in facts for one in wrong]
        goes = any(not one.stops for one in program(seed, me.size, me.hosts)[1])
        if goes and after > _LIMIT:
            problems.append(f"an operation ended {after:.1f} s after the last thing that happened: program {seed}")
        done, failures, slowest = done + 1, failures + bool(problems), max(slowest, after * goes)
        if me.rank == 0:
            for one in problems[:5]:
                say("FAILED " + one.replace("\n", " "))
            say(f"at {seed}")
    me.end()
    if me.rank == 0:
        say(f"slowest {slowest:.1f} done {done} failed {failures}")


if __name__ == "__main__":
    main()
