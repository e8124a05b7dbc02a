"""A rank that runs random programs on the core alone, with numpy: ``program_core FIRST COUNT SECONDS``.

Each rank starts the operations of a program in another order, and ranks do not meet between programs. Each operation
must
end right, or with the error that belongs to the fault that was planted in it, on all ranks of its group.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from typing import Any

import numpy as np
from compiled import core
from mpi4py import MPI

from . import drawing
from .drawing import Fault, Operation
from .job import say

_LIMIT = 45.0  # seconds after which an operation counts as hung; the core gives up what waits for 10 s
_GIVE_UP = 10.0
_LATE = 1 / 1000  # share of faults that cost ten seconds
_BUCKET_BYTES = 1 << 17
_SETS = {2: [[1]], 3: [[0, 2], [1, 2]], 4: [[1, 3], [0, 2, 3]]}


class Groups:
    """All ranks, and some of them."""

    def __init__(self, options: dict) -> None:
        self.comm = MPI.COMM_WORLD
        core.init(self.comm.py2f(), options)
        self.rank, self.size = core.rank(), core.size()
        self.hosts = len(core.host_ranks())
        self.members = [list(range(self.size)), *_SETS[self.size]]
        self.groups = [core.world()]
        for ranks in self.members[1:]:
            part = self.comm.Split(0 if self.rank in ranks else MPI.UNDEFINED, self.rank)
            self.groups.append(core.make_group(part.py2f(), ranks, options) if self.rank in ranks else None)
        self.buffers = [one and one.allocate(_BUCKET_BYTES) for one in self.groups]
        core.begin_stall_watch()
        self._watching = threading.Thread(target=self._watch)
        self._watching.start()

    @staticmethod
    def _watch() -> None:
        while core.next_stalls(0.0, _GIVE_UP) is not None:
            pass

    def end(self) -> None:
        """Leave, all together."""
        self.comm.Barrier()
        core.end_stall_watch()
        self._watching.join()  # one that comes back from the core while Python exits would end the process
        core.shutdown()


class Started:
    """An operation that was asked for; `groups` has the members `groups` and `buffers`, one of each for each group."""

    def __init__(self, groups: Any, operation: Operation, asked: Operation, offset: int) -> None:
        group = groups.groups[operation.group]
        me = group.rank()
        mine = [drawing.values(asked, me, device) for device in range(asked.devices)]
        name, common = asked.name, {"priority": asked.priority}
        if asked.kind in ("bucket", "owners"):
            buffer = groups.buffers[operation.group]
            part = np.asarray(buffer)[offset : offset + mine[0].nbytes].view(asked.dtype)
            part[:] = mine[0]
            self.results = [part]
            common.update(op=asked.op, scale=asked.scale, wire=asked.wire, layout=asked.layout)
            if asked.kind == "owners":
                common["shards"] = shards(asked.count, group.size())
            begin = offset // mine[0].itemsize
            self.work = group.submit_bucket(name, buffer, begin, asked.count, asked.dtype, **common)
            return
        if asked.kind == "broadcast":
            self.results = [np.zeros_like(one) for one in mine]
            given = mine[0] if me == asked.root else None
            self.work = group.submit_broadcast(name, given, self.results, asked.root, **common)
            return
        self.results = mine if asked.in_place else [np.zeros_like(one) for one in mine]
        common.update(op=asked.op, scale=asked.scale, wire=asked.wire)
        self.work = group.submit_allreduce(name, mine, self.results, **common)


def shards(count: int, size: int) -> list[tuple[int, int, int]]:
    """A bucket's elements, each rank's share in turn."""
    cuts = [count * rank // size for rank in range(size + 1)]
    return [(begin, end - begin, owner) for owner, (begin, end) in enumerate(zip(cuts, cuts[1:])) if end > begin]


def run(groups: Groups, seed: int, late: float) -> tuple[list[str], bool]:
    """Run one program; returns the errors, and whether a fault was planted."""
    sizes = [len(ranks) for ranks in groups.members]
    operations, fault = drawing.program(seed, sizes, groups.hosts, late)
    mine = [one for one in operations if groups.groups[one.group] is not None]
    offsets, end = {}, 0
    for one in operations:
        offsets[one.number] = end
        end += -(-one.count * 8 // 64) * 64 if one.kind in ("bucket", "owners") else 0
    order = _order(mine, random.Random(seed * 5 + groups.rank))
    victim = fault and groups.members[operations[fault.number].group][fault.victim]
    is_victim = victim == groups.rank
    started: dict[int, Started] = {}
    for one in order:
        asked = fault.changed if is_victim and one.number == fault.number else one
        if is_victim and one.number == fault.number and fault.what == "refused":
            groups.groups[one.group].refuse(one.name, "planted")
        elif is_victim and fault.what == "late" and one.name == operations[fault.number].name:
            continue  # with all turns of this name, which could otherwise take this one's
        else:
            started[one.number] = Started(groups, one, asked, offsets[one.number])
    late_name = operations[fault.number].name if fault and fault.what == "late" else None
    problems = []
    for phase in ("early", "late"):
        for one in mine:
            if (phase == "late") != (is_victim and one.name == late_name):
                continue
            if phase == "late":
                started[one.number] = Started(groups, one, one, offsets[one.number])
            if one.number in started:
                is_fault = fault is not None and (one.number == fault.number or one.name == late_name)
                problems += _check(groups, one, started[one.number], fault if is_fault else None, victim, seed)
        if late_name:
            groups.comm.Barrier()
    ones = np.ones(3, "int64")
    try:
        if not core.submit_allreduce("probe", [ones], [ones]).wait(_LIMIT) or (ones != groups.size).any():
            problems.append(f"{seed}: afterwards nothing goes on, or wrongly: {ones}")
    except core.Error as error:
        problems.append(f"{seed}: afterwards: {error}")
    return problems, fault is not None


def _order(operations: list[Operation], chance: random.Random) -> list[Operation]:
    """Another order, in which what has one name stays in its own."""
    mixed = list(operations)
    chance.shuffle(mixed)
    queues: dict[str, list[Operation]] = {}
    for one in operations:
        queues.setdefault(one.name, []).append(one)
    return [queues[one.name].pop(0) for one in mixed]


def _check(
    groups: Groups, one: Operation, started: Started, fault: Fault | None, victim: int | None, seed: int
) -> list[str]:
    where = f"program {seed}, rank {groups.rank}, operation {one}, fault {fault and (fault.what, fault.changed)}"
    size = len(groups.members[one.group])
    try:
        if not started.work.wait(_LIMIT):
            say(f"FAILED hang: {where}")
            groups.comm.Abort(3)
    except core.Error as error:
        if fault is None:
            return [f"unexpected error: {where}: {error}"]
        missing = [text for text in fault.texts(one, victim) if text not in str(error)]
        return [f"the error lacks {missing}: {where}: {error}"] if missing else []
    if fault is not None:
        return [f"no error: {where}"]
    wrong = wrong_values(one, started, groups.groups[one.group].rank(), size)
    return [f"wrong: {where}: {wrong}"] if wrong else []


def wrong_values(one: Operation, started: Started, me: int, size: int) -> str:
    """The result on rank `me` of the group if it differs from numpy's; empty if it is right."""
    if one.wire in drawing.LOSSY:
        return ""  # its values are the compressor's; that all ranks have the same bits is in tests/core/test_hosts.py
    wanted = drawing.expected(one, size)
    for result in started.results:
        if one.kind == "owners":
            own = [slice(begin, begin + count) for begin, count, owner in shards(one.count, size) if owner == me]
            if any(not np.array_equal(result[part], wanted[part]) for part in own):
                return f"{result} and not {wanted}"
        elif not np.array_equal(result, wanted):
            return f"{result} and not {wanted}"
    return ""


def main() -> None:
    first, count, seconds, part_bytes = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    options = {"part_bytes": part_bytes, "compress_bytes": 0 if part_bytes == 4096 else 65536}
    options["virtual_hosts"] = int(sys.argv[5])
    options["fan_out"] = 1 if part_bytes == 4096 else 16
    options["exchange"] = "grid" if part_bytes == 4096 else "direct"
    if part_bytes == 4096:
        options["table_capacity"] = 64  # too few for the parts of one array
    groups = Groups(options)
    end = time.monotonic() + seconds
    done = faults = 0
    problems: list[str] = []
    for seed in range(first, first + count):
        if seed % 50 == 0:  # the same number of programs on all ranks
            go_on = groups.comm.bcast(time.monotonic() < end)
            if not go_on:
                break
            if groups.rank == 0:
                say(f"at {seed}")
        wrong, planted = run(groups, seed, _LATE)
        problems += wrong
        done, faults = done + 1, faults + planted
    everybody = groups.comm.gather(problems)
    groups.end()
    if groups.rank == 0:
        failed = [one for rank in everybody for one in rank]
        for one in failed[:20]:
            say("FAILED " + one.replace("\n", " "))
        say(f"faults {faults} done {done} failed {len({one.split('program ')[-1].split(',')[0] for one in failed})}")


if __name__ == "__main__":
    main()
