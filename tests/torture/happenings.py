"""Random programs in which ranks leave, raise, break down or are stopped; the same on all ranks, by the seed."""

from __future__ import annotations

import dataclasses
import random

from . import drawing
from .drawing import Operation

_LARGE = [(20000,), (100000,), (300000,), (1500000,)]
_SCRIPTED = 50  # one of this many programs is a fixed one
# Events of a rank, with words of the resulting error.
CAUSES = {
    "leaves": "it leaves as planted",
    "raises": "it ends with ValueError: planted",
    "mpi": "MPI failed in ",
    "memory": "there is no memory for the exchange between hosts",
    "message": "mykv received a malformed message from another host",
}


@dataclasses.dataclass(frozen=True)
class Happening:
    """An event of one rank, before it starts its operation number `at`, or after all operations."""

    what: str  # a key of CAUSES, "stopped" or "stopped with the table locked"
    rank: int
    at: int
    wait: float  # seconds
    lasts: float = 0.0  # seconds that it is stopped
    chances: int = 0  # that go well before the planted fault

    @property
    def stops(self) -> bool:
        """Whether the rank continues afterwards."""
        return self.what not in CAUSES


def program(seed: int, size: int, hosts: int) -> tuple[list[Operation], list[Happening]]:
    """The operations, the same on all ranks, and what happens."""
    if seed % _SCRIPTED == 0:
        return _script(seed // _SCRIPTED, size, hosts)
    operations, _ = drawing.program(seed, [size], hosts, 0.0)
    chance = random.Random(seed * 11 + 3)
    for k, one in enumerate(operations):
        if one.op != "product" and one.wire not in drawing.LOSSY and chance.random() < 0.35:
            count = chance.choice(_LARGE[:2] if one.kind in ("bucket", "owners") else _LARGE)
            operations[k] = dataclasses.replace(one, shape=count)
    happenings = []
    for _ in range(chance.choice([0, 1, 1, 1, 2, 2, 2, 2, 2, 2])):
        what = chance.choice([*CAUSES, *CAUSES, "stopped", "stopped", "stopped with the table locked"])
        wait = chance.choice([0.0, 0.0, chance.uniform(0, 0.003), chance.uniform(0, 0.05), chance.uniform(0, 0.5)])
        at = chance.choice([chance.randrange(len(operations) + 1), len(operations)])
        one = Happening(what, chance.randrange(size), at, wait)
        if one.stops:
            one = dataclasses.replace(one, lasts=chance.uniform(1, 12))
        happenings.append(dataclasses.replace(one, chances=int(chance.expovariate(1 / 20)) + 1))
    return operations, happenings


def _script(number: int, size: int, hosts: int) -> tuple[list[Operation], list[Happening]]:
    """Programs that once made ranks wait forever, and similar ones."""
    last = size - size // hosts  # a rank of another host than rank 0, mostly the first one of it
    if number % 3 == 0:  # a rank is stopped in a large sum, and its partner leaves
        operations = [Operation(0, f"s{number}", "allreduce", 0, "float32", (1 << 22,))]
        return operations, [Happening("stopped", last, 1, 0.012, 6.5), Happening("leaves", 0, 1, 0.3)]
    operations = [Operation(k, f"s{number}/{k}", "allreduce", 0, "float32", (300 << k,)) for k in range(11)]
    if number % 3 == 1:  # the first rank of a host leaves while that which decides is stopped
        return operations, [Happening("stopped", 0, 0, 0.0, 7.0), Happening("leaves", last, len(operations), 0.5)]
    chance = random.Random(number)  # a rank breaks down, and lives
    what = chance.choice(["mpi", "memory", "message"])
    return operations, [Happening(what, chance.randrange(size), 0, 0.0, chances=chance.randint(1, 20))]
