"""The agreement of several hosts: the tree of messages, and small operations carried in these messages."""

from __future__ import annotations

import time
import zlib

import numpy as np
import pytest
from harness import dtypes

_ENV = {"MYKV_TEST_POOL": "hosts"}  # ranks that never import MXNet

_every_tree = pytest.mark.parametrize("fan_out", [1, 2, 16])


@pytest.fixture
def fan_out() -> int:
    return 16


@pytest.fixture
def core(size, fan_out, gather):
    """The core over a host for each rank, but that the first host has two ranks."""
    from compiled import core
    from mpi4py import MPI

    core.init(MPI.COMM_WORLD.py2f(), {"virtual_hosts": size - 1, "fan_out": fan_out})
    yield core
    gather("no rank asks for anything more")
    core.shutdown()


def _messages(core) -> int:
    sent, _, received, _ = core.agreement_traffic()
    return sent + received


@pytest.mark.ranks(3, 6, env=_ENV)
@_every_tree
def test_small_operations_are_right_and_equal_on_all_ranks(core, rank, size, gather):
    """Up to the size from which they are no longer carried, and behind it."""
    for count in (1, 2, 3, 31, 100, 819, 820, 1023, 1024, 1025, 2047, 2048, 4095, 4096, 4097, 5000):
        values = [np.random.RandomState(r + count).randn(count).astype("float32") for r in range(size)]
        array = values[rank].copy()
        assert core.submit_allreduce(f"mean {count}", [array], [array], scale=1 / size).wait(20)
        np.testing.assert_allclose(array, np.mean(values, axis=0, dtype="float64"), atol=1e-5)
        assert len(set(gather(zlib.crc32(array.tobytes())))) == 1
        for root in (0, size - 1):
            array = values[rank].copy()
            assert core.submit_broadcast(f"values {count}", array, [array], root).wait(20)
            assert (array == values[root]).all()


@pytest.mark.ranks(3, 6, env=_ENV)
@_every_tree
def test_small_operations_of_every_dtype_and_kind(core, rank, size):
    for dtype in [*dtypes.FLOATS, *dtypes.INTEGERS]:
        values = [((np.arange(77) * 7 + r * 3) % 5).astype(dtype) for r in range(size)]
        for op, expected in (("sum", np.add), ("min", np.minimum), ("max", np.maximum)):
            array = values[rank].copy()
            assert core.submit_allreduce(f"{dtype} {op}", [array], [array], op).wait(20)
            np.testing.assert_array_equal(array, expected.reduce([v.astype("float64") for v in values]).astype(dtype))


@pytest.mark.ranks(6, env=_ENV)
def test_a_small_operation_has_the_bits_of_a_large_one(core, rank, size):
    """Like one element of an array that is sent in slices: both are summed in the order of the hosts."""
    values = np.random.RandomState(rank).randn(20_000).astype("float32")
    small, large = values[:100].copy(), values.copy()
    for name, array in (("small", small), ("large", large)):
        assert core.submit_allreduce(name, [array], [array], scale=0.3).wait(20)
    assert (small == large[:100]).all()


@pytest.mark.ranks(3, env=_ENV)
def test_a_small_operation_costs_a_message_each_way(core, rank, size, gather):
    array = np.ones(1000, "float32")
    for _ in range(3):
        assert core.submit_allreduce("small", [array], [array]).wait(10)
    gather("known")
    before = np.array(core.agreement_traffic())
    for _ in range(10):
        assert core.submit_allreduce("small", [array], [array]).wait(10)
    gather("counted")
    sent, sent_bytes, received, received_bytes = np.array(core.agreement_traffic()) - before
    if core.local_rank() == 0:
        assert 0 < sent <= 10 and 0 < received <= 10
        assert sent_bytes <= 10 * (4000 + 60) and received_bytes <= 10 * (4000 + 60)
        assert min(sent_bytes, received_bytes) >= sent * 4000
    else:
        assert (sent, received) == (0, 0)


@pytest.mark.alone
@pytest.mark.ranks(6, env=_ENV, timeout=60)
@pytest.mark.parametrize("fan_out, most", [(1, 2), (2, 3), (16, 4)])
def test_no_host_has_more_messages_than_its_place_in_the_tree_asks_for(core, rank, size, fan_out, most, gather):
    """A step of many operations shares messages: with each neighbour in the tree a few, not one for each operation."""
    arrays = [np.ones(5000, "float32") for _ in range(193)]
    least = []
    for _ in range(6):
        gather("the next step begins")
        before = _messages(core)
        works = [core.submit_allreduce(f"g{k}", [array], [array]) for k, array in enumerate(arrays)]
        assert all(work.wait(30) for work in works)
        gather("the step is over")
        least.append(_messages(core) - before)
    neighbours = most if fan_out < 16 or rank == 0 else 1
    assert min(least[1:]) <= 2 * neighbours * 12, least


@pytest.mark.ranks(6, env=_ENV, timeout=60)
@_every_tree
def test_who_differs_is_named_wherever_it_is_in_the_tree(core, rank, size):
    for odd in range(size):
        array = np.zeros(10 + (rank == odd))
        with pytest.raises(core.Error) as failure:
            core.submit_allreduce("shape", [array], [array]).wait(10)
        for word in ("shape", "(10,)", "(11,)", f"rank {odd}"):
            assert word in str(failure.value)
        if rank == odd:
            core.refuse("refused", "it has no wings")
        else:
            with pytest.raises(core.Error, match=rf"rank {odd}.* wings"):
                core.submit_allreduce("refused", [array], [array]).wait(10)
        array = np.ones(3)
        assert core.submit_allreduce("after", [array], [array]).wait(10)
        assert (array == size).all()


@pytest.mark.ranks(6, env=_ENV, timeout=90)
@_every_tree
def test_an_operation_that_is_given_up_ends_on_all_hosts_also_on_those_that_come_later(core, rank, size, gather):
    for asking in range(size):
        name = f"given up {asking}"
        late = (asking + 2) % size
        array = np.ones(10)
        work = core.submit_allreduce(name, [array], [array]) if rank != late else None
        gather("all but one have come")
        if rank == asking:
            core.give_up(name, "it took too long")
        if work is not None:
            with pytest.raises(core.Error, match="it took too long"):
                work.wait(10)
        gather("it has ended")
        if rank == late:
            with pytest.raises(core.Error, match="it took too long"):
                core.submit_allreduce(name, [array], [array]).wait(10)
        gather("everywhere")
        assert core.submit_allreduce(f"after {asking}", [array], [array]).wait(10)
        assert (array == size).all()


@pytest.mark.ranks(6, env=_ENV, timeout=120)
@pytest.mark.parametrize("fan_out", [1, 2])
@pytest.mark.parametrize("how, reason", [("leaves", "it had enough"), ("breaks down", "malformed message")])
def test_a_host_anywhere_in_the_tree_leaves(rank, size, fan_out, how, reason, gather):
    """The hosts below it are told, and all operations end on all ranks: with the right sum, or with the reason."""
    from compiled import core, testing
    from mpi4py import MPI

    rng = np.random.RandomState(fan_out)
    for leaver in (0, 2, 3, size - 1):
        core.init(MPI.COMM_WORLD.py2f(), {"virtual_hosts": size - 1, "fan_out": fan_out})
        arrays = [np.full(100 if k % 2 else 6000, rank + 1.0) for k in range(31)]
        gather("go")
        works = [core.submit_allreduce(f"x{k}", [array], [array]) for k, array in enumerate(arrays[1:])]
        if rank == leaver:
            time.sleep(rng.uniform(0, 0.002))
            if how == "leaves":
                core.leave("it had enough")
            else:
                testing.plant("message", 1)
        begin = time.monotonic()
        ends = [_end_of(core, array, work) for array, work in zip(arrays[1:], works)]
        later = _end_of(core, arrays[0], core.submit_allreduce("later", [arrays[0]], [arrays[0]]))
        testing.plant("message", 0)
        took = time.monotonic() - begin
        gather("all have their answers")
        core.shutdown()
        wrong = [end for end in ends if end != "the right sum" and reason not in end]
        assert gather(wrong) == [[]] * size
        assert reason in later
        assert took < 15


def _end_of(core, array, work) -> str:
    """How an operation of test_a_host_anywhere_in_the_tree_leaves() has ended."""
    try:
        if not work.wait(20):
            return "neither done nor failed"
        return "the right sum" if (array == 21).all() else f"the sum is {array}"
    except core.Error as error:
        return str(error)
