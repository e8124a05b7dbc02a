"""A rank that runs random programs on MXNet's arrays: collective operations, two stores, process sets.

Asynchronous operations are started in another order on each rank, blocking operations in the same order. One rank may
do something else with one operation: then all ranks of its process set get an error that names it, and the next program
runs as before.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import kvstore_plugin as mykv
import numpy as np
from harness.collectives_model import reduced
from harness.support import MXNetError, array, clear_errors, fail, mx, value

from .loop import loop

_LIMIT = 60.0  # seconds for one program
_SETS = {2: [[1]], 3: [[0, 2], [1, 2]], 4: [[1, 3], [0, 2, 3]]}
_WAIT = ("allgather", "alltoall", "barrier")
_CALLS = ["allreduce", "allreduce_", "grouped_allreduce", "grouped_allreduce_", "broadcast", "broadcast_"]
_CALLS += ["reducescatter", *_WAIT, "pushpull", "compressed pushpull", "store broadcast"]
_DTYPES = ["float16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool"]
_SHAPES = [(1,), (4,), (3, 5), (40, 2), (1000,), (7000,)]
_OPS = [mykv.Sum, mykv.Min, mykv.Max, mykv.Product]


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a program, as a rank asks for it."""

    number: int
    call: str
    group: int
    dtype: str
    shape: tuple
    op: Any
    root: int
    parts: int

    waits = property(lambda self: self.call in _WAIT)
    stored = property(lambda self: "push" in self.call or "store" in self.call)

    def values(self, rank: int) -> list[np.ndarray]:
        """The input of a rank of the group."""
        return [
            ((np.arange(np.prod(self.shape, dtype=int)) * 5 + rank * 3 + self.number + part) % 4)
            .reshape(self.shape)
            .astype(self.dtype)
            for part in range(self.parts)
        ]

    def expected(self, me: int, size: int) -> list[np.ndarray]:
        """The expected result on rank `me` of the group."""
        every = [self.values(rank) for rank in range(size)]
        if "broadcast" in self.call:
            return every[0 if self.stored else self.root]
        if self.call == "allgather":
            return [np.concatenate([one[0] for one in every])]
        if self.call == "alltoall":
            return [np.concatenate([np.array_split(one[0], size)[me] for one in every])]
        sums = [reduced(mykv.Sum if self.stored else self.op, list(parts)) for parts in zip(*every)]
        return [np.array_split(one, size)[me] for one in sums] if self.call == "reducescatter" else sums


class World:
    """Process sets, and two stores for each of all ranks."""

    def __init__(self) -> None:
        mykv.init()
        self.rank = mykv.rank()
        self.sets = [mykv.global_process_set, *map(mykv.add_process_set, _SETS[mykv.size()])]
        self.stores = {"pushpull": mx.kv.create("mykv"), "compressed pushpull": mx.kv.create("mykv")}
        self.stores["compressed pushpull"].set_gradient_compression({"type": "fp16"})
        self.stores["store broadcast"] = self.stores["pushpull"]


def _program(seed: int, sizes: list[int]) -> tuple[list[Operation], tuple | None]:
    chance = random.Random(seed)
    operations = []
    for number in range(chance.randint(1, 8)):
        call = chance.choice(_CALLS)
        group = 0 if call.startswith(("push", "compressed", "store")) else chance.randrange(len(sizes))
        parts = chance.randint(1, 3) if "grouped" in call else 1
        dtype, shape, op = chance.choice(_DTYPES), chance.choice(_SHAPES), chance.choice(_OPS)
        operations.append(Operation(number, call, group, dtype, shape, op, chance.randrange(sizes[group]), parts))
    at = chance.choice(operations)
    if chance.random() < 0.5 or sizes[at.group] < 2:
        return operations, None
    choices: dict[str, Any] = {"refused": None}
    if at.dtype.startswith("float"):  # support.fail() makes no other kind of array fail
        choices["carries an error"] = None
    choices["dtype"] = chance.choice([one for one in _DTYPES if one != at.dtype])
    choices["shape"] = chance.choice([one for one in _SHAPES if one[1:] != at.shape[1:]])
    if at.waits:
        choices = {"call": chance.choice([one for one in _WAIT if one != at.call])}
        choices["refused"] = None
        if at.call == "allgather":
            choices["dtype"] = chance.choice([one for one in _DTYPES if one != at.dtype])
    elif at.call in ("broadcast", "broadcast_"):
        choices["root"] = (at.root + 1) % sizes[at.group]
    elif "reduce" in at.call:
        choices["op"] = chance.choice([one for one in _OPS if one != at.op])
    if "grouped" in at.call:
        choices["parts"] = at.parts + 1
    if at.call == "barrier":
        choices.pop("refused")
    what = chance.choice(sorted(choices))
    changed = at if choices[what] is None else dataclasses.replace(at, **{what: choices[what]})
    victim = chance.randrange(sizes[at.group])
    if what == "carries an error" and at.call == "broadcast":
        victim = at.root  # elsewhere the array is only looked at for its shape
    return operations, (at.number, victim, what, changed)


def _start(world: World, seed: int, one: Operation, bad: str) -> list:
    """Ask for an operation; `bad` is '', 'refused' or 'carries an error'. Returns the arrays of its results."""
    chosen = world.sets[one.group]
    me, size = chosen.rank(), chosen.size()
    mine: Any = [array(each) for each in one.values(me)]
    if bad == "carries an error":
        fail(mine[0])
    given = mine if "grouped" in one.call else mine[0]
    if bad == "refused":
        given = "no array"
    if one.stored:
        store = world.stores[one.call]
        (store.broadcast if "broadcast" in one.call else store.pushpull)(f"{one.call} {seed % 3}/{one.number}", given)
        return mine
    common: dict[str, Any] = {"process_set": chosen}
    if one.call == "barrier":
        mykv.barrier(**common)
        return []
    common["name"] = f"x {one.number}"
    if "reduce" in one.call:
        common["op"] = one.op
    elif "broadcast" in one.call:
        common["root_rank"] = chosen.ranks[one.root]
    elif one.call == "alltoall" and not bad:
        common["splits"] = [len(part) for part in np.array_split(one.values(me)[0], size)]
    result = getattr(mykv, one.call)(given, **common)
    result = result[0] if isinstance(result, tuple) else result
    return result if "grouped" in one.call else [result]


def run(world: World, seed: int) -> tuple[list[str], bool]:
    """Run one program; returns the errors, and whether a fault was planted."""
    sizes = [len(one.ranks) for one in world.sets]
    operations, fault = _program(seed, sizes)
    mine = [one for one in operations if world.sets[one.group].included()]
    victim = fault and world.sets[operations[fault[0]].group].ranks[fault[1]]
    errors: dict[int, str] = {}
    results: dict[int, list] = {}
    for one in _order(mine, random.Random(seed * 5 + world.rank)):
        is_bad = fault is not None and one.number == fault[0] and victim == world.rank
        bad = fault[2] if is_bad and fault[3] is operations[fault[0]] else ""
        try:
            results[one.number] = _start(world, seed, fault[3] if is_bad else one, bad)
        except (MXNetError, TypeError, ValueError) as error:
            errors[one.number] = str(error)
    problems = []
    for one in mine:
        is_fault = fault is not None and one.number == fault[0]
        what = f"program {seed}, rank {world.rank}, operation {one}, fault {fault if is_fault else None}"
        got = []
        if one.number not in errors:
            try:
                for each in results[one.number]:
                    each.wait_to_read()  # reading one without elements, a rank's share of few rows, does not wait
                got = [value(each) for each in results[one.number]]
            except MXNetError as error:
                errors[one.number] = str(error)
        text = errors.get(one.number)
        if is_fault and text is None:
            problems.append(f"no error: {what}")
        elif is_fault and world.rank != victim:
            # Min is min or Min there, as the user or the core calls it.
            missing = [word for word in _words(one, fault, victim) if word not in text.lower()]
            problems += [f"the error lacks {missing}: {what}: {text}"] if missing else []
        elif not is_fault and text is not None:
            problems.append(f"unexpected error: {what}: {text}")
        elif not is_fault:
            chosen = world.sets[one.group]
            wanted = one.expected(chosen.rank(), chosen.size()) if results[one.number] else []
            if len(got) != len(wanted) or any(not np.array_equal(*pair) for pair in zip(got, wanted)):
                problems.append(f"wrong: {what}: {got} and not {wanted}")
    clear_errors()
    return problems, fault is not None


def _words(one: Operation, fault: tuple, victim: int) -> list[str]:
    """Text that the errors of the other ranks must contain."""
    _, _, what, changed = fault
    words = [f"rank {victim}"]
    if what == "dtype":
        return [*words, one.dtype, changed.dtype]
    if what == "shape" and "grouped" not in one.call and not one.waits:
        return [*words, str(one.shape), str(changed.shape)]
    if what == "call":
        return [*words, one.call, changed.call]
    if what == "op":
        return [*words, one.op.value, changed.op.value]
    return words


def _order(operations: list[Operation], chance: random.Random) -> list[Operation]:
    """Blocking operations in order, the others anywhere between them."""
    order = [one for one in operations if not one.waits]
    chance.shuffle(order)
    waiting = [one for one in operations if one.waits]
    places = sorted(chance.randint(0, len(order)) for _ in waiting)
    for place, one in reversed(list(zip(places, waiting))):
        order.insert(place, one)
    return order


def main() -> None:
    world = World()
    loop(lambda seed: run(world, seed), _LIMIT)


if __name__ == "__main__":
    main()
