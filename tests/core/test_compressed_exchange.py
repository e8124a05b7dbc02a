"""Compression between hosts, simulated by ranks that share no memory: the bits of every step, order, errors."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from harness import compression_reference as reference
from harness.marks import long

_ENV = {"MYKV_TEST_POOL": "compressed hosts"}  # ranks that never import MXNet
_BOUND = 4096  # bytes from which these tests compress
_REPEATABLE = [
    ("2bit", {"threshold": 0.7}),
    ("2bit", {"threshold": 1.5, "ef": False}),
    ("1bit", {}),
    ("onebit", {}),
    ("onebit", {"scaling": False}),
    ("topk", {"k": 0.05}),
    ("topk", {"k": 200}),
    ("topk", {"k": 0.05, "ef": False}),
]
_RANDOM = [
    ("randomk", {"k": 0.2, "seed": 3}),
    ("dithering", {"seed": 3}),
    ("dithering", {"k": 5, "partition": "natural", "normalize": "l2"}),
]
# Without error feedback, what arrives has the value as its mean.
_UNBIASED = [
    ("randomk", {"k": 0.1, "ef": False}),
    ("randomk", {"k": 300, "ef": False}),
    *[
        ("dithering", {"k": k, "partition": partition, "normalize": normalize, "ef": False})
        for k, partition, normalize in [(1, "linear", "max"), (7, "linear", "l2"), (5, "natural", "max")]
    ],
]

_every_split = pytest.mark.parametrize("hosts", [2, 3])
_ids = {"ids": lambda one: one if isinstance(one, str) else " ".join(f"{k}={v}" for k, v in one.items())}


@pytest.fixture
def hosts() -> int:
    """Number of hosts; a parameter of some tests."""
    return 2


@pytest.fixture
def core(hosts, size, gather):
    """The core over this number of hosts, at most one per rank, for this test."""
    from compiled import core
    from mpi4py import MPI

    core.init(MPI.COMM_WORLD.py2f(), {"virtual_hosts": min(hosts, size), "compress_bytes": _BOUND})
    yield core
    gather("no rank asks for anything more")
    core.shutdown()
    assert "mxnet" not in sys.modules


def _of(rank: int, step: int, count: int, dtype: str = "float32") -> np.ndarray:
    return np.random.RandomState(100 * step + rank).standard_normal(count).astype(dtype)


class _Model:
    """The expected results of the exchange, step by step."""

    def __init__(self, host_ranks, name, parameters) -> None:
        self.host_ranks, self.name, self.parameters = host_ranks, name, parameters
        self.lost: dict = {}

    def _compressed(self, who, values, unit, total) -> np.ndarray:
        left = self.lost.get(who, np.zeros_like(values))
        _, decoded, left = reference.compress(self.name, values, left, total=total, unit=unit, **self.parameters)
        self.lost[who] = left
        return decoded

    def step(self, arrays, scale=1.0) -> np.ndarray:
        """The result of one operation, in the slices and segments of a single chunk."""
        count, real = len(arrays[0]), arrays[0].dtype.type
        slices, hosts = min(map(len, self.host_ranks)), len(self.host_ranks)
        sums = []
        for ranks in self.host_ranks:
            total = arrays[ranks[0]].copy()
            for rank in ranks[1:]:
                total += arrays[rank]
            sums.append(total)
        result = np.empty_like(arrays[0])
        for slice_ in range(slices):
            begin, end = count * slice_ // slices, count * (slice_ + 1) // slices
            for owner in range(hosts):
                part = slice(begin + (end - begin) * owner // hosts, begin + (end - begin) * (owner + 1) // hosts)
                brought = [
                    sums[host][part]
                    if host == owner
                    else self._compressed((slice_, owner, host), sums[host][part], 1.0, count)
                    for host in range(hosts)
                ]
                total = brought[0].copy()
                for one in brought[1:]:
                    total += one
                total *= real(scale)
                result[part] = self._compressed((slice_, owner), total, abs(scale) * hosts, count)
        return result


@pytest.mark.ranks(2, 3, long=(4,), env=_ENV)
@_every_split
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name, parameters", _REPEATABLE, **_ids)
def test_every_step_gives_the_bits_of_the_model_on_all_ranks(core, rank, size, hosts, name, parameters, dtype):
    model = _Model(core.host_ranks(), name, parameters)
    wire = reference.text(name, **parameters)
    count = 5003
    for step in range(6):
        scale = 1.0 if step % 2 else 1 / size
        array = _of(rank, step, count, dtype)
        expected = model.step([_of(one, step, count, dtype) for one in range(size)], scale)
        core.submit_allreduce("one", [array], [array], "sum", scale, wire=wire).wait(30)
        assert array.tobytes() == expected.tobytes(), f"step {step}"


@pytest.mark.ranks(2, 4, env=_ENV)
@pytest.mark.parametrize("name, parameters", _RANDOM, **_ids)
def test_random_compressors_give_the_same_bits_on_all_ranks_and_in_every_run(
    core, rank, size, gather, name, parameters
):
    def run(turns):
        results = []
        for step in range(4):
            array = _of(rank, step, 20000)
            core.submit_allreduce(turns, [array], [array], wire=reference.text(name, **parameters)).wait(30)
            results.append(array.tobytes())
        core.forget(turns)
        return results

    first = run("again")
    assert all(one == first for one in gather(first))
    assert run("again") == first, "counted by step, which forget() has set back"
    assert run("another name") != first


@pytest.mark.ranks(3, long=(2, 4), env=_ENV, timeout=150)
@pytest.mark.parametrize("hosts", [2, 4])
def test_without_error_feedback_the_mean_of_results_is_the_value(core, rank, size):
    """200 draws of an allreduce, and of a reduction to owners, of which only the first compresses its result too."""
    count, draws = 1500, 200
    arrays = [1 + 0.5 * _of(one, 0, count, "float64") for one in range(size)]
    exact = sum(arrays) / size
    buffer = core.allocate(8 * count)
    values = np.frombuffer(buffer, "float64")
    division = [(count * r // size, count * (r + 1) // size - count * r // size, r) for r in range(size)]
    mine = slice(division[rank][0], sum(division[rank][:2]))
    for name, parameters in _UNBIASED:
        wire = reference.text(name, **parameters)
        for shards, part in [([], slice(0, count)), (division, mine)]:
            arrived = []
            for _ in range(draws):
                values[:] = arrays[rank]
                what = f"{'reduce' if shards else 'allreduce'} {wire}"
                core.submit_bucket(what, buffer, 0, count, "float64", scale=1 / size, wire=wire, shards=shards).wait(30)
                arrived.append(values[part].copy())
            mean, deviation = np.mean(arrived, axis=0), np.std(arrived, axis=0) / np.sqrt(draws)
            assert deviation.max() > 0, f"{what}: nothing was drawn"
            assert abs(mean.sum() / exact[part].sum() - 1) < 0.03, what
            assert (abs(mean - exact[part]) <= 6 * deviation.max()).all(), what


@pytest.mark.ranks(4, long=(2, 3), env=_ENV)
@pytest.mark.parametrize("hosts", [long(2), 3])
@pytest.mark.parametrize("name, parameters", [*_REPEATABLE, *_RANDOM], **_ids)
@pytest.mark.parametrize("count", [400_000, long(1), 2000])
def test_parts_chunks_and_segments_of_all_sizes(core, rank, size, hosts, gather, name, parameters, count):
    """Several parts and chunks; fewer elements than compressed at all."""
    wire = reference.text(name, **parameters)
    sums, exact = np.zeros(count), np.zeros(count)
    for step in range(3):
        array = _of(rank, step, count)
        exact += sum(_of(one, step, count).astype("float64") for one in range(size))
        core.submit_allreduce("large", [array], [array], wire=wire).wait(30)
        assert len(set(gather(array.tobytes()))) == 1
        sums += array
    if 4 * count < _BOUND:
        np.testing.assert_allclose(sums, exact, rtol=1e-4, atol=1e-4)
    else:
        assert abs(sums - exact).max() > 1e-3, "nothing was compressed"


@pytest.mark.ranks(2, env=_ENV)
@pytest.mark.parametrize("count, is_compressed", [(_BOUND // 4 - 1, False), (_BOUND // 4, True)])
def test_small_arrays_are_not_compressed(core, rank, count, is_compressed):
    array = np.full(count, 0.1 + rank, "float32")
    core.submit_allreduce("small", [array], [array], wire="2bit").wait(30)
    exact = np.float32(0.1) + np.float32(1.1)
    assert (array == exact).all() == (not is_compressed)


@pytest.mark.ranks(2, env=_ENV)
@pytest.mark.parametrize("dtype", ["float16", "int32", "uint8"])
def test_other_types_are_not_compressed(core, rank, dtype):
    array = np.full(5000, 1 + rank, dtype)
    core.submit_allreduce("typed", [array], [array], wire="topk k=1").wait(30)
    assert (array == 3).all()


@pytest.mark.ranks(2, 4, env=_ENV)
@pytest.mark.parametrize("hosts", [1])
def test_within_a_host_nothing_is_compressed(core, rank, size):
    array = np.full(5000, 0.1 + rank, "float32")
    core.submit_allreduce("here", [array], [array], wire="1bit").wait(30)
    exact = np.float32(0.1)
    for one in range(1, size):
        exact += np.float32(0.1 + one)
    assert (array == exact).all()


@pytest.mark.ranks(4, env=_ENV)
def test_what_is_lost_is_kept_by_name(core, rank, size):
    """Two names at the same time, each with its own history; many operations in flight."""
    models = {name: _Model(core.host_ranks(), "topk", {"k": 0.1}) for name in ("a", "b")}
    for step in range(5):
        works = []
        for number, name in enumerate(models):
            array = _of(rank, 10 * number + step, 3000)
            works.append((name, array, core.submit_allreduce(name, [array], [array], wire="topk k=0.1")))
        for number, (name, array, work) in enumerate(works):
            work.wait(30)
            expected = models[name].step([_of(one, 10 * number + step, 3000) for one in range(size)])
            assert array.tobytes() == expected.tobytes()


@pytest.mark.ranks(2, 4, env=_ENV)
def test_operations_of_a_name_in_flight_together_count_in_their_order(core, rank, size):
    model = _Model(core.host_ranks(), "2bit", {"threshold": 0.7})
    arrays = [_of(rank, step, 3000) for step in range(30)]
    works = [core.submit_allreduce("same", [one], [one], wire="2bit threshold=0.7") for one in arrays]
    for step, work in enumerate(works):
        assert work.wait(30)
        expected = model.step([_of(one, step, 3000) for one in range(size)])
        assert arrays[step].tobytes() == expected.tobytes(), f"step {step}"


@pytest.mark.ranks(2, env=_ENV)
@pytest.mark.parametrize("how", ["forget", "compressor", "count", "dtype"])
def test_what_is_lost_is_dropped_with_the_name_and_where_it_no_longer_fits(core, rank, how):
    def step(count=3000, dtype="float32", wire="2bit threshold=2.0"):
        array = np.full(count, 0.75, dtype)
        core.submit_allreduce("one", [array], [array], wire=wire).wait(30)
        return array[0], array[-1]

    first = [step() for _ in range(4)]
    assert first[0] == (0, 0) and any(one != (0, 0) for one in first), "what is kept adds up"
    assert [step() for _ in range(4)] != first
    if how == "forget":
        core.forget("on")
    elif how == "compressor":
        step(wire="topk k=10")
    elif how == "count":
        step(count=3001)
    else:
        step(dtype="float64")
    assert [step() for _ in range(4)] == first


@pytest.mark.ranks(2, 4, env=_ENV)
@pytest.mark.parametrize("name, parameters", [*_REPEATABLE, *_RANDOM], **_ids)
def test_a_step_that_is_not_finite_is_nan_everywhere_and_spoils_no_later_one(
    core, rank, size, gather, name, parameters
):
    wire = reference.text(name, **parameters)
    for step in range(4):
        array = _of(rank, step, 3000)
        if step == 1 and rank == size - 1:
            array[5] = np.inf
        core.submit_allreduce("one", [array], [array], wire=wire).wait(30)
        assert len(set(gather(array.tobytes()))) == 1
        assert np.isnan(array).any() == (step == 1)
        assert np.isfinite(array).any()


@pytest.mark.ranks(2, 3, env=_ENV)
def test_other_compressors_on_the_ranks_are_an_error_that_names_both(core, rank):
    wires = ["topk k=0.1 ef=True", "topk k=0.2 ef=True"]
    array = np.ones(5000, "float32")
    with pytest.raises(core.Error) as failure:
        core.submit_allreduce("one", [array], [array], wire=wires[rank == 1]).wait(30)
    for wire in wires:
        assert f"compressed by '{wire}' between hosts" in str(failure.value)
    array[:] = 1
    assert core.submit_allreduce("after", [array], [array]).wait(30)


@pytest.mark.ranks(1, env=_ENV)
def test_only_sums_can_be_compressed(core):
    array = np.ones(5000, "float32")
    with pytest.raises(ValueError, match="only sums can be compressed, not a max"):
        core.submit_allreduce("one", [array], [array], "max", wire="2bit")
    with pytest.raises(core.Error, match="there is no compressor 'zip'"):
        core.submit_allreduce("one", [array], [array], wire="zip")


@pytest.mark.ranks(3, 4, env=_ENV)
def test_buckets_in_shared_memory(core, rank, size):
    model = _Model(core.host_ranks(), "onebit", {})
    buffer = core.allocate(4 * 6000)
    values = np.frombuffer(buffer, "float32")
    for step in range(4):
        values[:] = _of(rank, step, 6000)
        expected = model.step([_of(one, step, 6000)[500:] for one in range(size)], 1 / size)
        core.submit_bucket("bucket", buffer, 500, 5500, "float32", scale=1 / size, wire="onebit").wait(30)
        assert values[500:].tobytes() == expected.tobytes()


@pytest.mark.ranks(2, env=_ENV)
def test_other_bounds_on_the_ranks_are_an_error(rank):
    from compiled import core
    from mpi4py import MPI

    with pytest.raises(core.Error, match="MYKV_COMPRESS_BYTES"):
        core.init(MPI.COMM_WORLD.py2f(), {"compress_bytes": 1000 + rank})
