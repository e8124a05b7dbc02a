"""Random operations on numpy arrays and their expected results; the same on all ranks, which share the seed."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np

FLOATS = ["float16", "float32", "float64"]
DTYPES = [*FLOATS, "int8", "uint8", "int32", "int64", "bool"]
_SHAPES = [(), (1,), (3,), (0,), (2, 3), (17,), (4, 1, 5), (1000,), (33, 33), (5000,)]
_LARGE = [(40000,), (300, 500)]
_SCALES = [1.0, 1.0, 0.5, 2.0, 0.25]
LOSSY = ["2bit threshold=0.7", "1bit", "topk k=0.1", "onebit", "randomk k=0.2 seed=3", "dithering seed=3"]


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a program, as a rank asks for it."""

    number: int
    name: str
    kind: str  # allreduce, broadcast, bucket, owners (a bucket of which each rank gets a share)
    group: int
    dtype: str
    shape: tuple
    op: str = "sum"
    scale: float = 1.0
    root: int = 0  # within the group
    devices: int = 1
    in_place: bool = False
    wire: str = ""
    priority: int = 0
    layout: str = ""

    @property
    def count(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=int))


@dataclasses.dataclass(frozen=True)
class Fault:
    """A rank's deviation from the others in one operation of a program."""

    number: int  # of the operation
    victim: int  # within the operation's group
    what: str  # the field that differs, or "refused", or "late"
    changed: Operation

    def texts(self, operation: Operation, label: int) -> list[str]:
        """Text that the errors of all ranks must contain. `label`: the victim in messages."""
        if self.what == "refused":
            return [operation.name, f"refused by rank {label}: planted"]
        if self.what == "late":
            return [operation.name, "given up after", f"rank {label}, which has not arrived"]
        return [
            operation.name,
            "differs between ranks",
            f"rank {label} has",
            *shown(operation, self.what),
            *shown(self.changed, self.what),
        ]


def shown(operation: Operation, what: str) -> list[str]:
    """One field of an operation, as shown in an error about a mismatch."""
    if what == "shape":
        comma = "," if len(operation.shape) == 1 else ""
        return [f"({', '.join(map(str, operation.shape))}{comma})"]
    if what == "scale":
        return [f"times {operation.scale:.17g}"] if operation.scale != 1 else []
    if what == "kind":
        return [{"allreduce": "allreduce ", "broadcast": "broadcast from"}[operation.kind]]
    return [str(getattr(operation, what))] if what != "root" else ["broadcast from rank"]


def program(seed: int, sizes: list[int], hosts: int, late: float) -> tuple[list[Operation], Fault | None]:
    """The operations of a program and, in about half of the programs, one fault.

    Parameters
    ----------
    seed : int
    sizes : list of int
        Number of ranks of each group; the first one has all.
    hosts : int
        Where it is 1, operations are not compressed.
    late : float
        Share of the faults in which a rank does not arrive until the others have given up.
    """
    chance = random.Random(seed)
    operations: list[Operation] = []
    names: list[Operation] = []
    for number in range(chance.randint(1, 8)):
        if names and chance.random() < 0.2:
            made = dataclasses.replace(chance.choice(names), number=number)  # a name again, with the next turn
        else:
            made = _operation(chance, number, f"p{seed}/{number}", sizes, hosts)
            if made.kind in ("allreduce", "broadcast"):
                names.append(made)
        operations.append(made)
    fault = _fault(chance, operations, sizes, late) if chance.random() < 0.5 else None
    return operations, fault


def _operation(chance: random.Random, number: int, name: str, sizes: list[int], hosts: int) -> Operation:
    group = chance.choice([0, 0, *range(len(sizes))])
    kind = chance.choice(["allreduce", "allreduce", "broadcast", "bucket", "owners"])
    shape = chance.choice(_LARGE if chance.random() < 0.08 else _SHAPES)
    dtype = chance.choice(DTYPES)
    made = Operation(number, name, kind, group, dtype, shape, priority=chance.randint(-3, 3))
    if kind == "broadcast":
        return dataclasses.replace(made, root=chance.randrange(sizes[group]), devices=chance.choice([1, 1, 2]))
    op = chance.choice(["sum", "sum", "min", "max", "product"])
    scale = chance.choice(_SCALES) if dtype in FLOATS else 1.0
    made = dataclasses.replace(made, op=op, scale=scale, in_place=chance.random() < 0.5)
    if kind != "allreduce":
        made = dataclasses.replace(made, shape=(chance.choice([1, 7, 64, 1000]),), layout=f"layout{number}")
    elif op == "sum":
        made = dataclasses.replace(made, devices=chance.choice([1, 1, 1, 2]))
    if hosts > 1 and op == "sum" and dtype in ("float32", "float64") and chance.random() < 0.4:
        made = dataclasses.replace(made, wire=chance.choice(["float16", "bfloat16", *LOSSY]))
    return made


def _fault(chance: random.Random, operations: list[Operation], sizes: list[int], late: float) -> Fault | None:
    at = chance.choice(operations)
    if sizes[at.group] < 2:
        return None
    victim = chance.randrange(sizes[at.group])
    if chance.random() < late:
        return Fault(at.number, victim, "late", at)
    choices: dict[str, Any] = {"refused": None}
    choices["dtype"] = chance.choice([one for one in DTYPES if one != at.dtype])
    if at.kind == "broadcast":
        choices["root"] = (at.root + 1) % sizes[at.group]
    else:
        choices["op"] = chance.choice([one for one in ("sum", "min", "max", "product") if one != at.op])
        choices["scale"] = 4.0
    if at.kind in ("bucket", "owners"):
        choices["layout"] = "another layout"
    else:
        choices["shape"] = chance.choice([one for one in [*_SHAPES, *_LARGE] if one != at.shape])
        choices["kind"] = "broadcast" if at.kind == "allreduce" else "allreduce"
    what = chance.choice(sorted(choices))
    if what in ("refused",):
        return Fault(at.number, victim, what, at)
    changed = dataclasses.replace(at, **{what: choices[what]})
    if changed.kind != "allreduce" or changed.op != "sum" or changed.dtype not in ("float32", "float64"):
        changed = dataclasses.replace(changed, wire="")
    if changed.op != "sum":
        changed = dataclasses.replace(changed, devices=1)
    return Fault(at.number, victim, what, changed)


def values(operation: Operation, rank: int, device: int = 0) -> np.ndarray:
    """A rank's input: small whole numbers, so that every sum and product is exact in every dtype."""
    numbers = (np.arange(operation.count) * 5 + rank * 3 + operation.number + device) % 4
    return numbers.reshape(operation.shape).astype(operation.dtype)


def expected(operation: Operation, size: int) -> np.ndarray:
    """The result."""
    if operation.kind == "broadcast":
        return values(operation, operation.root)
    brought = [values(operation, rank, device) for rank in range(size) for device in range(operation.devices)]
    if operation.dtype == "bool":
        function = np.any if operation.op in ("sum", "max") else np.all
        return function(brought, axis=0)
    functions = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}
    whole = functions[operation.op].reduce([one.astype("float64") for one in brought])
    return (whole * operation.scale).astype(operation.dtype)
