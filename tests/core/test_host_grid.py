"""Large values between many hosts: the grid in which the hosts exchange them."""

from __future__ import annotations

import math
import zlib
from functools import reduce

import numpy as np
import pytest
from harness import dtypes

_ENV = {"MYKV_TEST_POOL": "hosts"}  # ranks that never import MXNet
_COUNT = 300_001  # two chunks of float32


def _start(size: int, **options) -> None:
    from compiled import core
    from mpi4py import MPI

    core.init(MPI.COMM_WORLD.py2f(), {"virtual_hosts": size - 1, "exchange": "grid", **options})


@pytest.fixture
def core(size, gather):
    """The core over a host for each rank, but that the first host has two ranks."""
    from compiled import core

    _start(size)
    yield core
    gather("no rank asks for anything more")
    core.shutdown()


def _rows(size: int) -> list[list[int]]:
    """The hosts of each row."""
    from compiled import testing

    return [sorted(set(row)) for row in testing.square_grid(size - 1)]


def _in_the_order_of_the_grid(values: list):
    """Adds up the values of ranks: on the first host, in each row, then over the rows."""
    of_hosts = [values[0] + values[1], *values[2:]]
    return reduce(np.add, [reduce(np.add, [of_hosts[host] for host in row]) for row in _rows(len(values))])


def test_every_grid_has_each_host_in_one_row_and_each_column_in_each_row():
    from compiled import testing

    for hosts in [*range(2, 200), 1000, 1023, 1024, 4096]:
        rows = testing.square_grid(hosts)
        assert sorted(host for row in rows for host in set(row)) == list(range(hosts))
        columns = {len(row) for row in rows}
        widths = {len(set(row)) for row in rows}
        assert len(columns) == 1 and max(widths) == max(columns) and max(widths) - min(widths) <= 1
        peers = max(columns) - 1 + 2 * (len(rows) - 1)  # a host of a shorter row may have two columns
        assert peers <= 3 * math.ceil(math.sqrt(hosts))
        assert len(widths) == 1 or hosts not in (8, 32, 128, 1000, 1024, 4096)
        for row in rows:
            assert row == [row[column % len(set(row))] for column in range(len(row))]


@pytest.mark.ranks(3, 4, 6, 9, env=_ENV, timeout=60)
def test_sums_have_the_order_of_the_grid_on_all_ranks(core, rank, size, gather):
    for count in (4097, 5000, 70_000, _COUNT):
        values = [np.random.RandomState(r + count).randn(count).astype("float32") for r in range(size)]
        array = values[rank].copy()
        assert core.submit_allreduce(f"mean {count}", [array], [array], scale=0.3).wait(30)
        np.testing.assert_array_equal(array, np.float32(0.3) * _in_the_order_of_the_grid(values))
        assert len(set(gather(zlib.crc32(array.tobytes())))) == 1


@pytest.mark.ranks(9, env=_ENV, timeout=60)
@pytest.mark.parametrize("exchange, most", [("grid", 8), ("direct", 14)])
def test_a_rank_has_messages_with_its_row_and_its_column_only(rank, size, gather, exchange, most):
    """8 hosts in 2 rows of 4: values and results to and from 3 hosts of the row and 1 of the column."""
    from compiled import core

    _start(size, exchange=exchange)
    array = np.ones(20_000, "float32")
    gather("all count")
    before = np.array(core.exchange_traffic())
    assert core.submit_allreduce("sum", [array], [array]).wait(30)
    assert (array == size).all()
    sent, sent_bytes, received, received_bytes = np.array(core.exchange_traffic()) - before
    counts = gather((int(sent), int(received)))
    core.shutdown()
    assert counts[1] == (0, 0)  # the second rank of the first host: the others have one rank, so there is one slice
    assert max(max(one) for one in counts) == most
    assert max(sent_bytes, received_bytes) <= 2 * array.nbytes


@pytest.mark.ranks(4, 6, env=_ENV, timeout=60)
def test_every_dtype_and_operator(core, rank, size):
    for dtype in [*dtypes.FLOATS, *dtypes.INTEGERS]:
        values = [((np.arange(20_011) * 7 + r * 3) % 5).astype(dtype) for r in range(size)]
        for op, expected in (("sum", np.add), ("min", np.minimum), ("max", np.maximum), ("product", np.multiply)):
            array = values[rank].copy()
            assert core.submit_allreduce(f"{dtype} {op}", [array], [array], op).wait(30)
            np.testing.assert_array_equal(array, expected.reduce([v.astype("float64") for v in values]).astype(dtype))


@pytest.mark.ranks(6, env=_ENV, timeout=60)
def test_half_precision_is_rounded_once(core, rank, size):
    """No sum of a row is rounded, or overflows where the mean does not."""
    rng = np.random.RandomState(3)
    values = [(rng.randn(20_000) * 100).astype("float16") for _ in range(size)]
    values[0][0] = values[1][0] = 0.0
    for r in range(2, size):
        values[r][0] = 60_000.0
    array = values[rank].copy()
    assert core.submit_allreduce("mean", [array], [array], scale=1 / size).wait(30)
    of_hosts = [values[0].astype("float32") + values[1], *values[2:]]
    rows = [reduce(np.add, [of_hosts[host].astype("float32") for host in row]) for row in _rows(size)]
    np.testing.assert_array_equal(array, (reduce(np.add, rows) * np.float32(1 / size)).astype("float16"))
    assert np.isfinite(array).all()


@pytest.mark.ranks(4, 6, env=_ENV, timeout=60)
@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_values_that_travel_in_half_precision_are_equal_on_all_ranks(core, rank, size, gather, wire):
    values = [np.random.RandomState(r).randn(_COUNT).astype("float32") for r in range(size)]
    array = values[rank].copy()
    assert core.submit_allreduce("mean", [array], [array], scale=1 / size, wire=wire).wait(30)
    np.testing.assert_allclose(array, np.mean(values, axis=0, dtype="float64"), atol=0.05)
    assert np.abs(array - np.mean(values, axis=0, dtype="float64")).max() > 0  # it was rounded on its way
    assert len(set(gather(zlib.crc32(array.tobytes())))) == 1


@pytest.mark.ranks(6, env=_ENV, timeout=60)
def test_buckets_and_operations_with_a_root_run_beside_it(core, rank, size, gather):
    buffer = core.allocate(4 * _COUNT)
    values = [np.random.RandomState(r).randn(_COUNT).astype("float32") for r in range(size)]
    bucket = np.frombuffer(buffer, "float32")
    for step in range(5):
        bucket[:] = values[rank]
        sent = [np.full(30_000, 10 * step + root, "float32") for root in range(size)]
        if rank != 0:
            sent = [np.zeros(30_000, "float32") if root != rank else array for root, array in enumerate(sent)]
        works = [core.submit_bucket("bucket", buffer, 0, _COUNT, "float32")]
        works += [core.submit_broadcast(f"values {root}", array, [array], root) for root, array in enumerate(sent)]
        assert all(work.wait(30) for work in works)
        np.testing.assert_array_equal(bucket, _in_the_order_of_the_grid(values))
        for root, array in enumerate(sent):
            assert (array == 10 * step + root).all()
    gather("the bucket is free")


@pytest.mark.ranks(4, env=_ENV)
def test_ways_that_differ_are_refused_on_all_ranks(rank, size, gather):
    from compiled import core

    with pytest.raises(core.Error, match="MYKV_EXCHANGE"):
        _start(size, exchange="grid" if rank == 0 else "direct")
    gather("all know")


@pytest.mark.ranks(4, 6, env=_ENV, timeout=60)
@pytest.mark.parametrize("exchange", ["grid", "direct"])
def test_a_broadcast_crosses_each_link_twice_at_most(rank, size, gather, exchange):
    from compiled import core

    _start(size, exchange=exchange)
    values = np.random.RandomState(5).randn(_COUNT).astype("float32")
    for root in range(size):
        array = values.copy() if rank == root else np.zeros(_COUNT, "float32")
        gather("all count")
        before = np.array(core.exchange_traffic())
        assert core.submit_broadcast("values", array, [array], root).wait(30)
        np.testing.assert_array_equal(array, values)
        _, sent, _, received = np.array(core.exchange_traffic()) - before
        counts = gather((int(sent), int(received)))
        assert max(max(one) for one in counts) <= 2 * values.nbytes
        first_of_host = root if root > 1 else 0  # the first host has ranks 0 and 1
        assert counts[first_of_host][1] == 0  # the root's host has all values
    gather("the last broadcast is over")
    core.shutdown()
