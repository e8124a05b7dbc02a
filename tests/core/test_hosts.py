"""Several hosts, simulated by ranks that share no memory: results, order, and ranks that fail or leave."""

from __future__ import annotations

import os
import re
import resource
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from harness import dtypes, launcher
from harness.marks import long
from harness.processes import shared_memory

_ENV = {"MYKV_TEST_POOL": "hosts"}  # ranks that never import MXNet
_WITH_MXNET = {"MYKV_VIRTUAL_HOSTS": "2"}

_every_split = pytest.mark.parametrize("hosts", [2, 3, 4])  # of 2, 3 and 4 ranks: also hosts of unequal size
_one_and_two = pytest.mark.parametrize("hosts", [1, 2])


def _start(**options) -> None:
    """Four hosts agree in a chain and exchange in a grid; fewer hosts agree with rank 0 and exchange directly."""
    from compiled import core
    from mpi4py import MPI

    many = options.get("virtual_hosts") == 4
    options.setdefault("fan_out", 1 if many else 16)
    options.setdefault("exchange", "grid" if many else "direct")
    core.init(MPI.COMM_WORLD.py2f(), options)


@pytest.fixture
def hosts() -> int:
    """Number of hosts; a parameter of some tests."""
    return 2


@pytest.fixture
def core(hosts, gather):
    """The core over this number of hosts, for this test."""
    from compiled import core

    _start(virtual_hosts=hosts)
    yield core
    gather("no rank asks for anything more")
    core.shutdown()
    assert "mxnet" not in sys.modules


def _of(rank: int, shape, dtype: str = "float32") -> np.ndarray:
    """Values of a rank, small enough that no dtype overflows in a sum."""
    return ((np.arange(np.prod(shape, dtype=int)) * 7 + rank * 3) % 11).reshape(shape).astype(dtype)


def _sum(size: int, shape, dtype: str = "float32") -> np.ndarray:
    return sum(_of(rank, shape, dtype).astype("float64") for rank in range(size)).astype(dtype)


def _works(core, size: int, name: str) -> None:
    """Assert that all ranks can still reduce together."""
    array = np.ones(10)
    assert core.submit_allreduce(name, [array], [array]).wait(20)
    assert (array == size).all()


@pytest.mark.ranks(2, 3, 4, env=_ENV)
@_every_split
def test_neighbours_share_a_host_and_hosts_differ_by_one_rank_at_most(core, rank, size, hosts, gather):
    places = core.host_ranks()
    assert [r for ranks in places for r in ranks] == list(range(size))
    assert len(places) == min(hosts, size)
    lengths = [len(ranks) for ranks in places]
    assert max(lengths) - min(lengths) <= 1
    mine = next(ranks for ranks in places if rank in ranks)
    assert (core.local_rank(), core.local_size()) == (mine.index(rank), len(mine))
    peers = [ranks[core.local_rank()] for ranks in places if len(ranks) > core.local_rank()]
    assert (core.cross_rank(), core.cross_size()) == (peers.index(rank), len(peers))
    assert all(answer == places for answer in gather(places))


@pytest.mark.ranks(2, 3, 4, env=_ENV)
@_every_split
def test_sums_of_every_dtype_are_those_of_numpy(core, rank, size, hosts):
    for dtype in [*dtypes.FLOATS, *dtypes.INTEGERS]:
        for shape in ((), (1,), (7,), (3, 1001)):
            array = _of(rank, shape, dtype)
            assert core.submit_allreduce(f"{dtype} {shape}", [array], [array]).wait(30)
            np.testing.assert_array_equal(array, _sum(size, shape, dtype))


def _half(values: np.ndarray, dtype: str) -> np.ndarray:
    """The bits of float32 values in half precision, rounded to nearest even."""
    if dtype == "float16":
        return values.astype("float16").view("uint16")
    bits = values.astype("float32").view("uint32").astype("uint64")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("uint16")


def _whole(bits: np.ndarray, dtype: str) -> np.ndarray:
    """The float32 values of bits in half precision."""
    if dtype == "float16":
        return bits.view("float16").astype("float32")
    return (bits.astype("uint32") << 16).view("float32")


@pytest.mark.ranks(4, long=(5,), env=_ENV, timeout=120)
@pytest.mark.parametrize(
    "options", [{"virtual_hosts": 2}, {"virtual_hosts": 3}, {"virtual_hosts": 2, "fan_out": 1, "exchange": "grid"}]
)
def test_half_precision_is_rounded_once_whatever_the_hosts_are(rank, size, options, gather):
    """Small operations, slices of one chunk and of several, shards with owners, in buckets and in arrays."""
    from compiled import core

    _start(**options)
    for dtype in ("float16", "bfloat16"):
        for count in (10, 3000, 40_000, *([1_300_000] if dtype == "float16" else [])):
            rng = np.random.RandomState(count)
            bits = [_half(rng.randint(-2000, 2001, count).astype("float32"), dtype) for _ in range(size)]
            for one in bits:  # sums that float16 cannot hold
                one[:2] = _half(np.array([60_000, -60_000], "float32"), dtype)
            total = sum(_whole(one, dtype) for one in bits)  # exact in float32
            expected = _half(total * np.float32(1 / size), dtype)
            buffer = core.allocate(2 * count)
            bucket = np.frombuffer(buffer, "uint16")
            bucket[:] = bits[rank]
            assert core.submit_bucket(f"{dtype} {count}", buffer, 0, count, dtype, scale=1 / size).wait(60)
            np.testing.assert_array_equal(bucket, expected)
            bucket[:] = bits[rank]
            middle = count // 3
            shards = [(0, middle, size - 1), (middle, count - middle, 0)]
            assert core.submit_bucket(
                f"{dtype} {count} owned", buffer, 0, count, dtype, scale=1 / size, shards=shards
            ).wait(60)
            for begin, length, owner in shards:
                if owner == rank:
                    np.testing.assert_array_equal(bucket[begin : begin + length], expected[begin : begin + length])
            if dtype == "float16":
                array = bits[rank].view("float16").copy()
                assert core.submit_allreduce(f"array {count}", [array], [array], scale=1 / size).wait(60)
                np.testing.assert_array_equal(array.view("uint16"), expected)
                array[:] = bits[rank].view("float16")
                assert core.submit_allreduce(f"max {count}", [array], [array], "max").wait(60)
                np.testing.assert_array_equal(array, np.max([one.view("float16") for one in bits], axis=0))
    gather("no rank asks for anything more")
    core.shutdown()


@pytest.mark.ranks(2, 3, 4, env=_ENV)
@_every_split
@pytest.mark.parametrize("op, expected", [("min", np.minimum), ("max", np.maximum), ("product", np.multiply)])
def test_other_operations_are_those_of_numpy(core, rank, size, hosts, op, expected):
    values = [np.random.RandomState(r).randn(1003) for r in range(size)]
    array = values[rank].copy()
    assert core.submit_allreduce(op, [array], [array], op).wait(30)
    np.testing.assert_allclose(array, expected.reduce(values), rtol=1e-15)


@pytest.mark.ranks(2, 3, 4, env=_ENV)
@_every_split
def test_large_arrays_and_buckets_have_the_same_bits_on_all_ranks(core, rank, size, hosts, gather):
    count = (3 << 20) // 4 + 17
    values = [np.random.RandomState(r).randn(count).astype("float32") for r in range(size)]
    mean = np.mean(values, axis=0, dtype="float64")
    array = values[rank].copy()
    assert core.submit_allreduce("large", [array], [array], scale=1 / size).wait(30)
    np.testing.assert_allclose(array, mean, atol=1e-6)
    assert len(set(gather(zlib.crc32(array.tobytes())))) == 1

    buffer = core.allocate(4 * (count + 1))
    bucket = np.frombuffer(buffer, "float32")
    bucket[0] = -1
    bucket[1 : count + 1] = values[rank]
    assert core.submit_bucket("bucket", buffer, 1, count, "float32", "", "sum", 1 / size).wait(30)
    np.testing.assert_allclose(bucket[1 : count + 1], mean, atol=1e-6)
    assert bucket[0] == -1
    assert len(set(gather(zlib.crc32(bucket.tobytes())))) == 1


@pytest.mark.ranks(2, 3, 4, env=_ENV)
@_every_split
def test_broadcast_from_any_root(core, rank, size, hosts):
    for root in range(size):
        for count in (0, 1, 1000, (1 << 20) + 3):
            array = _of(rank, count, "int32")
            assert core.submit_broadcast(f"{count}", array, [array], root).wait(30)
            np.testing.assert_array_equal(array, _of(root, count, "int32"))


@pytest.mark.ranks(2, 3, 4, env=_ENV)
@_every_split
def test_many_operations_in_another_order_on_each_rank(core, rank, size, hosts):
    """Of all kinds and sizes, with priorities that contradict each other between ranks."""
    count = 60
    order = np.random.RandomState(rank).permutation(count)
    arrays, works = {}, {}
    for k in map(int, order):
        length = 1 + (k * 7919) % 50_000
        arrays[k] = np.full(length, float(k + rank))
        priority = k * (-1) ** rank
        if k % 5 == 0:
            works[k] = core.submit_broadcast(f"op {k}", arrays[k], [arrays[k]], k % size, priority)
        else:
            works[k] = core.submit_allreduce(f"op {k}", [arrays[k]], [arrays[k]], priority=priority)
    for k in range(count):
        assert works[k].wait(30)
        assert (arrays[k] == (k + k % size if k % 5 == 0 else size * k + size * (size - 1) / 2)).all(), k


@pytest.mark.ranks(2, 3, 4, env=_ENV)
@_every_split
def test_calls_under_one_name_are_matched_in_their_order(core, rank, size, hosts):
    arrays = [np.full(100 * (k % 7 + 1), float(k + rank)) for k in range(100)]
    works = [core.submit_allreduce("same", [array], [array]) for array in arrays]
    for k, (array, work) in enumerate(zip(arrays, works)):
        assert work.wait(30)
        assert (array == size * k + size * (size - 1) / 2).all()


@pytest.mark.ranks(2, 3, 4, env=_ENV)
@_every_split
def test_disagreement_is_named_on_every_rank(core, rank, size, hosts):
    """Whichever rank differs, on the first host, on the last, or between them."""
    for odd in range(size):
        array = np.zeros(10 + (rank == odd))
        with pytest.raises(core.Error) as failure:
            core.submit_allreduce("shape", [array], [array]).wait(10)
        for word in ("shape", "(10,)", "(11,)", "rank"):
            assert word in str(failure.value)
        array = np.zeros(10, "int32" if rank == odd else "float32")
        with pytest.raises(core.Error, match=r"int32.*float32|float32.*int32"):
            core.submit_allreduce("dtype", [array], [array]).wait(10)
        _works(core, size, "dtype")


@pytest.mark.ranks(2, 3, 4, env=_ENV)
@_every_split
def test_refusal_reaches_every_rank_with_its_reason(core, rank, size, hosts):
    for who in range(size):
        array = np.ones(10)
        if rank == who:
            core.refuse("refused", "it has no wings")
        else:
            with pytest.raises(core.Error, match=rf"rank {who}.* wings"):
                core.submit_allreduce("refused", [array], [array]).wait(10)
        _works(core, size, "refused")


@pytest.mark.ranks(2, 3, env=_ENV, timeout=40)
@_one_and_two
def test_refusal_in_the_middle_of_a_large_array_fails_all_of_it_everywhere(core, rank, size, hosts, gather):
    """The last rank runs out of memory for the parts of an array, of which the first have gone through."""
    part = (4 << 20) + 4096  # bytes; the size of slots that free their address only for slots of the same size
    gather("the first core is at rest")
    core.shutdown()
    _start(virtual_hosts=hosts, part_bytes=part, staging_bytes=16 * part)
    _works(core, size, "small")  # leaves a small slot behind, which does not run out
    kept = []
    if rank == size - 1:
        nbytes = 1 << 44
        while nbytes >= part:
            try:
                kept.append(core.reserve(nbytes))
            except core.Error:
                nbytes = nbytes // 2 if nbytes // 2 > part or nbytes == part else part
                if kept and nbytes == part and kept[-1].nbytes == part:
                    break
        assert kept[-1].nbytes == part
        kept.pop()  # room for one part
    array = np.ones(20 * part // 4, "float32")
    with pytest.raises(core.Error, match=rf"rank {size - 1}\b.*memory"):
        core.submit_allreduce("large", [array], [array]).wait(20)
    _works(core, size, "small")
    kept.clear()


@pytest.mark.ranks(3, 4, env=_ENV, timeout=60)
@pytest.mark.parametrize("hosts", [1, 2, 3, long(4)])
@pytest.mark.parametrize("leaver", [0, long(1), 2])
def test_a_rank_that_leaves_with_operations_in_flight_lets_nobody_hang(rank, size, hosts, leaver, gather):
    """Each operation went through with the right sum or fails with the reason, on every rank, within seconds."""
    from compiled import core

    rng = np.random.RandomState(leaver)
    outcomes = set()
    for _ in range(8):
        delay = rng.uniform(0, 0.001)
        _start(virtual_hosts=hosts)
        arrays = [np.full(2000, rank + 1) for _ in range(20)]
        gather("go")
        works = [core.submit_allreduce(f"x{k}", [array], [array]) for k, array in enumerate(arrays)]
        if rank == leaver:
            end = time.perf_counter() + delay
            while time.perf_counter() < end:
                pass
            core.leave("it had enough")
        begin = time.monotonic()
        for array, work in zip(arrays, works):
            try:
                assert work.wait(10), "neither done nor failed"
                assert (array == size * (size + 1) // 2).all()
                outcomes.add("done")
            except core.Error as error:
                assert "it had enough" in str(error)
                outcomes.add("failed")
        assert time.monotonic() - begin < 10
        gather("all have their answers")
        core.shutdown()
    assert outcomes


@pytest.mark.ranks(3, 4, env=_ENV)
@_one_and_two
def test_what_is_asked_of_a_rank_that_left_fails_at_once_however_often(core, rank, size, hosts, gather):
    """More operations than any table holds; none leaves anything behind."""
    if rank == size - 1:
        core.leave("gone fishing")
    gather("it has left")
    array = np.ones(4, "float32")
    begin = time.monotonic()
    for k in range(300):
        with pytest.raises(core.Error, match="gone fishing" if rank < size - 1 else "left"):
            core.submit_allreduce(f"late {k}", [array], [array]).wait(10)
    assert time.monotonic() - begin < 15


@pytest.mark.ranks(3, env=_ENV)
@_one_and_two
def test_operation_that_all_ranks_have_begun_ends_well_when_a_rank_leaves(core, rank, size, hosts, gather):
    count = 6 << 20
    buffer = core.allocate(4 * count)
    array = np.frombuffer(buffer, "float32")
    array.fill(1)
    gather("memory is there")
    work = core.submit_bucket("large", buffer, 0, count, "float32")
    if rank == size - 1:
        while not work.done() and [missing for _, _, missing, _ in core.waiting("large")] != [[]]:
            time.sleep(0.001)
        core.leave("gone fishing")
    assert work.wait(30)
    assert (array == size).all()
    gather("all have the sum")


@pytest.mark.alone
@pytest.mark.ranks(2, env=_ENV, timeout=120)
@_one_and_two
def test_more_operations_at_once_than_the_table_holds(core, rank, size, hosts):
    """In opposite orders, so that most that wait for an entry find one that the other rank has made."""
    count = 70_000 if hosts == 1 else 20_000  # between hosts fewer are under way in any case
    arrays = np.ones((count, 2), "float32")
    order = range(count) if rank == 0 else reversed(range(count))
    works = [core.submit_allreduce(f"one of many {k}", [arrays[k]], [arrays[k]]) for k in order]
    begin = time.monotonic()
    for work in works:
        assert work.wait(60)
    assert time.monotonic() - begin < 20  # more than half a minute where all that wait are looked at for each
    assert (arrays == size).all()


@pytest.mark.ranks(2, 3, env=_ENV)
@_one_and_two
def test_names_can_be_forgotten_right_after_they_were_used(core, rank, size, hosts):
    """The next operation under the name is the first again, while other ranks may not have seen the end of the last."""
    for turn in range(300):
        array = np.full(100, rank + turn)
        assert core.submit_allreduce("f/x", [array], [array]).wait(10)
        assert (array == size * turn + size * (size - 1) // 2).all()
        core.forget("f/")


@pytest.mark.ranks(2, 3, env=_ENV)
@_one_and_two
@pytest.mark.parametrize(
    "option, variable, values",
    [
        ("part_bytes", "MYKV_PART_BYTES", (1_000_000, 2_000_000)),
        ("network_bytes", "MYKV_NETWORK_BYTES", (1_000_000, 2_000_000)),
        ("virtual_hosts", "MYKV_VIRTUAL_HOSTS", (1, 2)),
        ("stall_abort_ms", "MYKV_STALL_ABORT_S", (0, 10_000)),
    ],
)
def test_settings_that_differ_are_refused_on_all_ranks(rank, size, hosts, gather, option, variable, values):
    from compiled import core

    mine = {"virtual_hosts": hosts, option: values[rank == size - 1]}
    with pytest.raises(core.Error, match=rf"{variable}.* {values[0]} on rank 0 and {values[1]} on rank {size - 1}"):
        _start(**mine)
    assert not core.is_initialized()
    gather("all know")
    _start(virtual_hosts=hosts)
    _works(core, size, "again")
    gather("done")
    core.shutdown()


@pytest.mark.ranks(2, 3, env=_ENV)
@_one_and_two
def test_a_rank_that_cannot_start_fails_init_on_all_ranks(rank, size, hosts, gather):
    """One rank cannot map the segment; the others learn that and do not wait."""
    from compiled import core

    for who in (0, size - 1):
        before = resource.getrlimit(resource.RLIMIT_AS)
        if rank == who:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), before[1]))
        gather("limited")
        begin = time.monotonic()
        try:
            with pytest.raises(core.Error, match="segment|memory") as failure:
                _start(virtual_hosts=hosts)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
        assert time.monotonic() - begin < 10
        assert rank == who or f"rank {who}" in str(failure.value)
        assert not core.is_initialized()
        gather("all know")
    _start(virtual_hosts=hosts)
    _works(core, size, "again")
    gather("done")
    core.shutdown()


@pytest.mark.ranks(2, env=_ENV)
@_one_and_two
def test_a_fork_that_drops_its_copy_of_a_buffer_leaves_the_parents(core, rank, size, hosts, gather):
    buffer = core.allocate(8 << 20)
    values = np.frombuffer(buffer, "float32")
    values[:] = rank + 1
    child = os.fork()
    if child == 0:
        del values, buffer
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (values == rank + 1).all()
    assert core.submit_bucket("after", buffer, 0, len(values), "float32").wait(20)
    assert (values == 3).all()


@pytest.mark.ranks(2, env=_ENV)
@_one_and_two
def test_a_buffer_dropped_while_its_bucket_is_under_way_lives_until_the_end(core, rank, size, hosts, gather):
    buffer = core.allocate(8 << 20)
    np.frombuffer(buffer, "float32")[:] = 1
    if rank == 0:
        work = core.submit_bucket("x", buffer, 0, 1 << 21, "float32")
        del buffer
        buffer = core.allocate(8 << 20)  # not where the first one still is
        np.frombuffer(buffer, "float32")[:] = 100
        gather("dropped")
    else:
        gather("dropped")
        work = core.submit_bucket("x", buffer, 0, 1 << 21, "float32")
    assert work.wait(20)
    assert (np.frombuffer(buffer, "float32") == (100 if rank == 0 else 2)).all()


def _data(step: int, rank: int):
    rng = np.random.RandomState(1000 * step + rank)
    return rng.randn(4, 6), rng.randn(4, 2)


@pytest.mark.ranks(4, long=(3,), env=_WITH_MXNET)
@pytest.mark.parametrize("trainer", ["DistributedTrainer", "MyKV"])
def test_training_on_two_hosts_equals_one_process(rank, size, gather, trainer):
    import kvstore_plugin as mykv
    from harness.support import array, checksum, dense_network, mx, parameters
    from mxnet import autograd, gluon

    def train(net, trainer, batches, batch_size):
        for x, y in batches:
            with autograd.record():
                # By hand, since MXNet rounds rescale_grad, and its 2.0 the result of L2Loss too, to float32.
                loss = ((net(array(x)) - array(y)) ** 2 * array(np.full(y.shape, 1 / batch_size))).sum()
            loss.backward()
            trainer.step(1)

    mykv.init()
    assert mykv.cross_size() == 2 or rank == 1  # of three ranks, the middle one's place is not on the other host
    net = dense_network(seed=rank, dtype="float64")
    optimizer = ("sgd", {"learning_rate": 0.1, "momentum": 0.9})
    mine = [_data(step, rank) for step in range(5)]
    if trainer == "MyKV":
        mykv.broadcast_parameters(net.collect_params())
        stock = gluon.Trainer(net.collect_params(), *optimizer, kvstore=mx.kv.create("mykv"))
        train(net, stock, mine, 4 * size)
    else:
        train(net, mykv.DistributedTrainer(net.collect_params(), *optimizer), mine, 4)

    alone = dense_network(seed=0, dtype="float64")
    everyone = [[np.concatenate(parts) for parts in zip(*(_data(step, r) for r in range(size)))] for step in range(5)]
    train(alone, gluon.Trainer(alone.collect_params(), *optimizer, kvstore=None), everyone, 4 * size)
    expected = parameters(alone)
    for name, values in parameters(net).items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-10, atol=1e-10, err_msg=name)
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(3, 4, env=_WITH_MXNET)
def test_pushpull_on_two_hosts_sums_and_names_what_differs(rank, size):
    import kvstore_plugin as mykv  # noqa: F401
    from harness.support import MXNetError, array, clear_errors, mx, numbers, total, value

    store = mx.kv.create("mykv")
    keys = [int(k) for k in np.random.RandomState(rank).permutation(20)]
    outs = {key: array(np.zeros(1000 + key, "float32")) for key in keys}
    for key in keys:
        store.pushpull(key, array(numbers(rank, (1000 + key,))), out=outs[key], priority=-key)
    for key in keys:
        np.testing.assert_array_equal(value(outs[key]), total(size, (1000 + key,)))
    out = array(np.zeros(3 + (rank == size - 1), "float32"))
    store.pushpull("odd", out, out=out)
    with pytest.raises(MXNetError) as failure:
        value(out)
    for word in ("odd", "(3,)", "(4,)"):
        assert word in str(failure.value)
    clear_errors()


@pytest.mark.ranks(2, 3, env=_ENV)
@_one_and_two
def test_ranks_of_other_versions_are_refused_naming_both(rank, size, hosts, gather):
    from compiled import core

    for name in ("mykv", "MXNet"):
        versions = {"mykv": "1.0", "MXNet": "1.9.1"}
        if rank == size - 1:
            versions[name] = "2.0"
        with pytest.raises(core.Error, match=rf"rank 0 has mykv 1.0, MXNet 1.9.1 and rank {size - 1} has .*{name} 2.0"):
            _start(virtual_hosts=hosts, versions=versions)
        gather("all know")
    _start(virtual_hosts=hosts, versions={"mykv": "1.0"})
    _works(core, size, "again")
    gather("done")
    core.shutdown()


@pytest.mark.alone
@pytest.mark.ranks(2, env=_ENV)
def test_a_rank_that_waits_for_another_host_sleeps(core, rank, size, hosts, gather):
    """Under 10% of a core while a rank of another host is late, in one of six waits: other work makes it dearer."""
    used = []
    for _ in range(6):
        array = np.ones(1000)
        gather("go")
        if rank == 1:
            time.sleep(1.0)
        begin = time.process_time()
        assert core.submit_allreduce("late", [array], [array]).wait(20)
        used.append(time.process_time() - begin)
    assert rank == 1 or min(used) < 0.1, used


@pytest.mark.ranks(2, env=_ENV)
def test_memory_for_copies_is_bounded_however_slow_the_network_is(rank, size, gather):
    """Of 48 MB no more is copied at a time than there is memory for, and what the first exchange needed."""
    from compiled import core

    _start(virtual_hosts=2, part_bytes=1 << 17, staging_bytes=1 << 20, network_bytes=1 << 17)
    array = np.ones(12 << 20, "float32")
    assert core.submit_allreduce("large", [array[: 1 << 19]], [array[: 1 << 19]]).wait(20)
    gather("warm")
    before = shared_memory()
    assert core.submit_allreduce("large", [array], [array]).wait(60)
    assert shared_memory() - before < 8 << 20
    assert (array[1 << 19 :] == 2).all()
    gather("done")
    core.shutdown()


@pytest.mark.ranks(3, 4, env=_ENV)
def test_a_higher_priority_overtakes_what_waits_for_the_network(rank, size, gather):
    """All ranks see one order, whoever posts first: operations wait at rank 0, which begins with the most urgent."""
    from compiled import core

    _start(virtual_hosts=2, network_bytes=1 << 16)
    arrays = [np.full(100_000, float(rank), "float32") for _ in range(30)]
    works = [core.submit_allreduce(f"x{k}", [array], [array], priority=k) for k, array in enumerate(arrays)]
    for array, work in zip(arrays, works):
        assert work.wait(30)
        assert (array == size * (size - 1) / 2).all()
    gather("done")
    core.shutdown()


@pytest.mark.ranks(2, 4, env=_ENV)
def test_agreeing_takes_two_small_messages_for_each_host_and_operation_at_most(core, rank, size, hosts, gather):
    """Texts are sent once."""
    array = np.ones(10_000)  # too large to be carried
    for _ in range(3):
        assert core.submit_allreduce("a long name of an operation " * 4, [array], [array]).wait(10)
    gather("known")
    before = np.array(core.agreement_traffic())
    for _ in range(10):
        assert core.submit_allreduce("a long name of an operation " * 4, [array], [array]).wait(10)
    gather("counted")
    sent, sent_bytes, received, received_bytes = np.array(core.agreement_traffic()) - before
    if core.local_rank() == 0:
        assert 0 < sent <= 10 and 0 < received <= 10
        assert sent_bytes <= 10 * 48 and received_bytes <= 10 * 48
    else:
        assert (sent, received) == (0, 0)


def _wake_ups() -> int:
    """Number of sleeps of the core's thread in this process."""
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == "mykv":
            return int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", (task / "status").read_text(), re.MULTILINE)[1])
    raise AssertionError("the core has no thread")


@pytest.mark.alone
@pytest.mark.ranks(4, env=_ENV)
def test_only_the_first_rank_of_a_host_looks_at_the_network_all_the_time(core, rank, size, gather):
    """The others have nothing to hear there while nothing is under way, and are woken by their host."""
    _works(core, size, "before")
    gather("idle")
    time.sleep(2.5)  # for messages that MPI may still hold
    before = _wake_ups()
    time.sleep(2)
    woken = _wake_ups() - before
    assert woken > 50 if core.local_rank() == 0 else woken < 20, woken
    _works(core, size, "after")


def _next_communicator() -> int:
    """Number of the next one that Open MPI makes in this process; it takes the lowest that is free."""
    from mpi4py import MPI

    comm = MPI.COMM_SELF.Dup()
    number = comm.py2f()
    comm.Free()
    return number


@pytest.mark.skipif(not launcher.is_open_mpi(), reason="counts communicators as Open MPI does")
@pytest.mark.ranks(3, env=_ENV)
def test_groups_that_come_and_go_take_their_communicators_again(core, rank, size, gather):
    """With messages left in them, of an operation that one rank alone has asked for; the next sums are right."""
    from mpi4py import MPI

    communicators = []
    for number in range(12):
        group = core.make_group(MPI.COMM_WORLD.py2f(), list(range(size)), {"virtual_hosts": 2})
        array = np.full(100_000, number + rank, "float32")
        assert group.submit_allreduce("sum", [array], [array]).wait(30)
        assert (array == size * number + 3).all()
        if rank == number % size:
            alone = group.submit_allreduce(f"alone {number}", [array], [array])
        group.leave("it is through")
        if rank == number % size:
            with pytest.raises(core.Error, match=f"alone {number}"):
                alone.wait(30)
        del group
        gather("all have left")
        communicators.append(_next_communicator())
    assert communicators[-1] == communicators[0], communicators


@pytest.mark.ranks(3, env=_ENV)
def test_who_has_refused_or_had_an_error_waits_for_no_rank(core, rank, gather):
    """Ranks 0 and 1 share a host; each rank that has not arrived asks who waits for it."""
    array = np.ones(10, "float32")
    if rank == 1:
        core.refuse("refused", "it has no gradient")
        given_up = core.submit_allreduce("given up", [array], [array])
        core.give_up("given up", "it took too long")
        with pytest.raises(core.Error, match="it took too long"):
            given_up.wait(20)
        waits = core.submit_allreduce("waits", [array], [array])
    gather("rank 1 has come")
    if rank != 1:
        assert core.waiting_for_this(["refused", "given up", "waits"]) == [[], [], [1]]
    gather("all have looked")
    if rank != 1:
        for name, error in (("refused", "no gradient"), ("given up", "took too long")):
            with pytest.raises(core.Error, match=error):
                core.submit_allreduce(name, [array], [array]).wait(20)
        waits = core.submit_allreduce("waits", [array], [array])
    assert waits.wait(20)


@pytest.mark.skipif(not launcher.is_open_mpi(), reason="counts communicators as Open MPI does")
@pytest.mark.ranks(3, env=_ENV)
def test_groups_that_one_rank_keeps_do_not_keep_later_ones_from_their_communicators(core, rank, size, gather):
    """The others have given the communicators of the first nine groups back, which rank 1 has not."""
    from mpi4py import MPI

    kept, communicators = [], []
    for number in range(14):
        group = core.make_group(MPI.COMM_WORLD.py2f(), list(range(size)), {"virtual_hosts": 2})
        array = np.full(1000, number + rank, "float32")
        assert group.submit_allreduce("sum", [array], [array]).wait(30)
        assert (array == size * number + 3).all()
        if number < 9 and rank == 1:
            kept.append(group)
        else:
            group.leave("it is through")
        del group
        gather("all have left")
        communicators.append(_next_communicator())
    assert communicators[-1] == communicators[10], communicators
    for group in kept:
        group.leave("it is through")


_WITHOUT_MEMFD = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from programs.lock_down import forbid_memfd

forbid_memfd()

import kvstore_plugin as mykv
import mxnet as mx
mykv.init()
store = mx.kv.create("mykv")
x = mx.nd.full((300000,), mykv.rank() + 1)
store.pushpull("x", x)
assert (x.asnumpy() == mykv.size() * (mykv.size() + 1) / 2).all()
assert (mykv.local_size(), mykv.cross_size()) == (1, mykv.size())
print("summed", mykv.rank())
"""


def test_ranks_that_may_not_share_memory_are_hosts_of_their_own_and_say_so_once(mpirun):
    result = mpirun(3, _WITHOUT_MEMFD)
    assert result.code == 0, result.text
    assert all(f"summed {rank}" in result.stdout for rank in range(3)), result.text
    assert result.text.count("memfd_create") == 1, result.text


def _cpu_seconds(names: str) -> float:
    """CPU time of this process's threads with this name."""
    total = 0
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == names:
            total += int((task / "schedstat").read_text().split()[0])
    return total * 1e-9


@pytest.mark.alone
@pytest.mark.ranks(2, env=_ENV)
def test_thread_that_waits_moves_messages_between_hosts_itself(core, gather):
    """Waking one thread after the other would cost more than the messages."""
    array = np.ones(16, "float32")  # MPI has sent it when it is told to
    core.submit_allreduce("first", [array], [array]).wait()
    used = []
    for _ in range(100):  # other work may delay the thread that waits, at different times on each rank
        gather("both begin")
        thread, caller = _cpu_seconds("mykv"), time.thread_time()
        for _ in range(100):
            core.submit_allreduce("small", [array], [array]).wait()
        used.append((_cpu_seconds("mykv") - thread) / (time.thread_time() - caller))
        if all(gather(min(used) < 0.3)):
            return
    raise AssertionError(used)


@pytest.mark.alone
@pytest.mark.ranks(2, 4, env=_ENV)
def test_operations_under_way_go_on_when_the_thread_that_waited_has_returned(core, rank, size, gather):
    """The thread that waited had moved them on; from then on the runtime's thread does, although no bell rings."""
    for turn in range(10):
        late = np.ones(1024, "float32")
        if rank != size - 1:
            under_way = core.submit_allreduce("late", [late], [late])
        _works(core, size, "waited for")
        if rank == size - 1:
            time.sleep(0.02 * turn)
            under_way = core.submit_allreduce("late", [late], [late])
        begun = time.monotonic()
        while not under_way.done():
            assert time.monotonic() - begun < 0.02 * turn + 0.5
            time.sleep(0.001)
        assert (late == size).all()
    gather("all are done")


@pytest.mark.alone
@pytest.mark.ranks(2, 4, env=_ENV)
@pytest.mark.parametrize(
    "fault, words",
    [
        ("mpi", "MPI failed in"),
        ("memory", "no memory for the exchange between hosts"),
        ("message", "malformed message from another host"),
    ],
)
@pytest.mark.parametrize("host", [0, -1])
def test_rank_that_breaks_down_ends_its_operations_on_all_ranks_at_once(core, rank, size, gather, fault, words, host):
    from compiled import testing

    breaks = core.host_ranks()[host][0]
    _works(core, size, "before")
    gather("the fault comes")
    if rank == breaks:
        testing.plant(fault, 1)
    try:
        array = np.ones(1 << 20, "float32")
        begun = time.monotonic()
        with pytest.raises(core.Error, match=words) as failure:
            core.submit_allreduce("large", [array], [array]).wait(20)
        # A failure detector, which there is not, would have 2 s to name a rank.
        assert time.monotonic() - begun < (1.8 if fault == "mpi" else 10)
        assert rank == breaks or f"rank {breaks}" in str(failure.value)
    finally:
        testing.plant(fault, 0)
