"""Random programs of collective operations, against numpy: any operations, dtypes, shapes, process sets, priorities.

Asynchronous operations start in another random order on each rank, blocking operations in the same order on all.
"""

from __future__ import annotations

import contextlib
import random

import hypothesis
import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.collectives_model import assert_equal, own_rows, reduced
from harness.support import DTYPES, array, mx, numbers, value
from hypothesis import strategies
from hypothesis.extra import numpy as arrays_of

# Process sets besides that of all ranks: disjoint and overlapping.
_SETS = {1: [], 2: [[0], [1]], 3: [[0, 2], [1], [1, 2]], 4: [[0, 2], [1, 3], [1, 2, 3]]}


@contextlib.contextmanager
def _process_sets(size):
    mykv.init()
    added = [mykv.add_process_set(ranks) for ranks in _SETS[size]]
    try:
        yield [mykv.global_process_set, *added]
    finally:
        for one in added:
            mykv.remove_process_set(one)


class _Tensors:
    """One tensor for each member of a process set, all of one dtype and shape unless `rows` gives first dimensions."""

    def __init__(self, salt, dtype, shape, rows=None):
        self.salt, self.dtype, self.shape, self.rows = salt, dtype, tuple(shape), rows

    def of(self, rank):
        shape = self.shape if self.rows is None else (self.rows[rank], *self.shape)
        return numbers(self.salt + rank, shape, self.dtype)

    def all(self, size):
        return [self.of(rank) for rank in range(size)]


def _expected_reduction(options, values):
    op = options["op"]
    before, after = options.get("prescale_factor", 1), options.get("postscale_factor", 1)
    return reduced(op, values, before, after)


class _Operation:
    """One operation of the program: how a rank starts it, and the expected result."""

    def __init__(self, number, call, process_set, tensors, options, kind, priority):
        self.number, self.call, self.process_set, self.tensors = number, call, process_set, tensors
        self.options, self.kind, self.priority = options, kind, priority

    waits = property(lambda self: self.call in ("allgather", "grouped_allgather", "alltoall", "barrier", "objects"))

    def start(self):
        me, size = self.process_set.rank(), self.process_set.size()
        mine = [array(tensor.of(me), self.kind) for tensor in self.tensors]
        common = {"process_set": self.process_set}
        if self.call == "barrier":
            return mykv.barrier(**common)
        if self.call == "objects":
            root = self.process_set.ranks[self.number % size]
            return mykv.allgather_object((me, self.number), **common), mykv.broadcast_object(me, root, **common)
        common.update(name=f"{self.call} {self.number}", priority=self.priority)
        given = mine if self.call.startswith("grouped") else mine[0]
        if self.call.startswith("broadcast"):
            common["root_rank"] = self.process_set.ranks[self.options["root"] % size]
        elif self.call == "alltoall":
            common["splits"] = self._matrix()[me].tolist()
        elif "reduce" in self.call:
            common.update(self.options)
        return getattr(mykv, self.call)(given, **common)

    def _matrix(self):
        size, rows = self.process_set.size(), self.tensors[0].rows
        cut = np.random.RandomState(self.number)
        return np.array([cut.multinomial(rows[rank], [1 / size] * size) for rank in range(size)])

    def check(self, result):
        me, size = self.process_set.rank(), self.process_set.size()
        if self.call == "barrier":
            return
        if self.call == "objects":
            assert result == ([(rank, self.number) for rank in range(size)], self.number % size)
            return
        if self.call == "alltoall":
            result, received = result
            matrix = self._matrix()
            assert value(received).tolist() == matrix[:, me].tolist()
            parts = [np.split(self.tensors[0].of(r), np.cumsum(matrix[r])[:-1])[me] for r in range(size)]
            assert_equal(value(result), np.concatenate(parts))
            return
        results = result if self.call.startswith("grouped") else [result]
        assert len(results) == len(self.tensors)
        for one, tensor in zip(results, self.tensors):
            assert_equal(value(one), self._expected(tensor.all(size), me, size))

    def _expected(self, values, me, size):
        if "gather" in self.call:
            return np.concatenate(values)
        if "broadcast" in self.call:
            return values[self.options["root"] % size]
        whole = _expected_reduction(self.options, values)
        return own_rows(whole, me, size) if "scatter" in self.call else whole


@strategies.composite
def _operations(draw, process_sets):
    calls = ["allreduce", "allreduce_", "grouped_allreduce", "grouped_allreduce_", "broadcast", "broadcast_"]
    calls += [
        "reducescatter",
        "grouped_reducescatter",
        "allgather",
        "grouped_allgather",
        "alltoall",
        "barrier",
        "objects",
    ]
    call = draw(strategies.sampled_from(calls))
    process_set = draw(strategies.sampled_from(process_sets))
    size = len(process_set.ranks)
    rows_matter = "scatter" in call or "gather" in call or call == "alltoall"
    kind = draw(strategies.sampled_from(["nd", "np"]))
    options = {"root": draw(strategies.integers(0, 3))}
    dtypes = DTYPES
    if "reduce" in call:
        ops = [mykv.Average, mykv.Sum, mykv.Min, mykv.Max, mykv.Product]
        options = {"op": draw(strategies.sampled_from(ops))}
        floats = [dtype for dtype in DTYPES if dtype.startswith("float")]
        factors = [1.0, 0.5, 2, 0.25]
        if options["op"] is mykv.Average:
            dtypes = [dtype for dtype in DTYPES if dtype != "bool"]
        if draw(strategies.booleans()):
            # What a negative number is as an unsigned integer depends on the machine.
            if draw(strategies.booleans()):
                dtypes, factors = floats, [*factors, -1]
            else:
                dtypes = [dtype for dtype in DTYPES if dtype != "bool"]
            one_of = strategies.sampled_from(factors)
            options.update(prescale_factor=draw(one_of), postscale_factor=draw(one_of))
    tensors = []
    for _ in range(draw(strategies.integers(1, 4)) if call.startswith("grouped") else 1):
        shape = draw(arrays_of.array_shapes(min_dims=1 if rows_matter else 0, max_dims=3, min_side=0, max_side=20))
        rows = draw(strategies.lists(strategies.integers(0, 9), min_size=size, max_size=size))
        if "gather" not in call and call != "alltoall":
            rows = None
        shape = shape if rows is None else shape[1:]
        tensors.append(_Tensors(draw(strategies.integers(0, 50)), draw(strategies.sampled_from(dtypes)), shape, rows))
    return call, process_set, tensors, options, kind, draw(strategies.integers(-3, 3))


def _shuffled(operations, seed):
    """Blocking operations in order, the others anywhere between them."""
    chance = random.Random(seed)
    waiting = [one for one in operations if one.waits]
    order = [one for one in operations if not one.waits]
    chance.shuffle(order)
    places = sorted(chance.randint(0, len(order)) for _ in waiting)
    for place, one in reversed(list(zip(places, waiting))):
        order.insert(place, one)
    return order


def _run(operations, rank, seed):
    mine = [one for one in operations if one.process_set.included()]
    with mx.util.np_shape(True):
        results = {one.number: one.start() for one in _shuffled(mine, seed * 4 + rank)}
        for one in mine:
            one.check(results[one.number])


def _random_programs(size, rank, data):
    with _process_sets(size) as process_sets:
        for _ in range(5):  # adding sets is slow
            drawn = data.draw(strategies.lists(_operations(process_sets), min_size=1, max_size=10))
            operations = [_Operation(number, *one) for number, one in enumerate(drawn)]
            _run(operations, rank, data.draw(strategies.integers(0, 1000)))


@pytest.mark.ranks(1, 2, 3, 4, timeout=180)
@hypothesis.settings(max_examples=6)
@hypothesis.given(data=strategies.data())
def test_any_program_gives_what_numpy_gives(rank, size, data):
    _random_programs(size, rank, data)


@pytest.mark.ranks(4, env={"MYKV_VIRTUAL_HOSTS": "2"}, timeout=180)
@hypothesis.settings(max_examples=6)
@hypothesis.given(data=strategies.data())
def test_any_program_over_two_hosts(rank, size, data):
    _random_programs(size, rank, data)


@pytest.mark.ranks(2, 4)
def test_two_hundred_operations_in_another_order_on_each_rank(rank, size):
    calls = ["allreduce", "allreduce_", "grouped_allreduce", "broadcast", "reducescatter", "grouped_reducescatter"]
    chance = random.Random(0)
    with _process_sets(size) as process_sets:
        operations = []
        for number in range(200):
            call = chance.choice(calls)
            options = {"root": chance.randint(0, 3)} if "broadcast" in call else {"op": mykv.Sum}
            shape = (chance.choice([1, 5, 1000, 30000]), 2)
            tensors = [
                _Tensors(number, chance.choice(["float32", "int32", "float64"]), shape) for _ in range(1 + number % 2)
            ]
            tensors = tensors if "grouped" in call else tensors[:1]
            process_set = chance.choice([process_sets[0], *process_sets])
            operations.append(_Operation(number, call, process_set, tensors, options, "nd", chance.randint(-5, 5)))
        for seed in range(3):
            _run(operations, rank, seed)
