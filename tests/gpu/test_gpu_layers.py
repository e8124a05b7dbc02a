"""Sums of arrays on GPUs between hosts with MYKV_GPU_HOSTS=arena: by NCCL within each host, and through host memory and
MPI between them. With stand-ins for libcudart and libnccl, on virtual hosts."""

from __future__ import annotations

import numpy as np
import pytest
from standin import gpu_support
from standin.gpu_arrays import LIMIT, Gpus, check_random_allreduces, piece, place

_ENV = {"MYKV_TEST_POOL": "layers", "MYKV_VIRTUAL_HOSTS": "2"}
_LARGE = 40_003  # float32: more than 64 KiB, and no multiple of the number of ranks

pytestmark = pytest.mark.ranks(4, env=_ENV)


@pytest.fixture
def gpus(request, rank, size, gather):
    core = gpu_support.start_core(request, gpu_hosts="arena", part_bytes=32 << 10)
    reason = "MYKV_GPU_HOSTS=arena, and there are several hosts; within each of them large sums go by NCCL"
    assert core.gpu_road() == (True, False, reason)
    made = Gpus(core, rank, size, gather)
    yield made
    for array in made.arrays:
        array.free()
    assert made.cuda.violations() == []
    assert made.cuda.standin_calls("cudaStreamSynchronize") == 0


def _calls(gpus) -> np.ndarray:
    names = ("ncclAllReduce", "ncclReduce", "ncclReduceScatter", "ncclBroadcast", "ncclAllGather")
    return np.array([gpus.calls(name) for name in names])


def _shape(rng, case: int) -> tuple:
    return (int(rng.choice([1, 9_000, 16_384, 33_333, 100_000])),)


@pytest.mark.parametrize("seed", [1, 2])
def test_sums_of_all_kinds_in_any_order_are_those_of_numpy(gpus, seed):
    before = _calls(gpus)
    check_random_allreduces(gpus, seed, 16, _shape)
    assert (_calls(gpus) > before).any() and _calls(gpus)[0] == before[0]


@pytest.mark.parametrize("count, expected", [(_LARGE - 3, [0, 0, 1, 0, 1]), (_LARGE, [0, 2, 0, 2, 0]), (100, [0] * 5)])
def test_each_host_sums_to_shards_of_its_ranks(gpus, count, expected):
    before = _calls(gpus)
    work, out = gpus.allreduce(f"shards of {count}", np.arange(count, dtype="float32") + gpus.rank, scale=0.5)
    assert work.wait(LIMIT)
    np.testing.assert_array_equal(out.numpy(), 2 * np.arange(count, dtype="float32") + 3)
    np.testing.assert_array_equal(_calls(gpus) - before, expected)


def test_in_place_and_after_what_is_in_the_streams_it_names(gpus):
    data, late = gpus.array(np.zeros(_LARGE)), gpus.array(np.full(_LARGE, gpus.rank + 1.0))
    gpus.cuda.cudaSetDevice(gpus.device())
    stream = gpus.cuda.stream()
    gpus.cuda.standin_delay(gpus.device(), stream, 50000)
    gpus.cuda.cudaMemcpyAsync(data.pointer, late.pointer, data.nbytes, 3, stream)
    memory = {"inputs": [place(data)], "outputs": [place(data)], "streams": [(stream.value, gpus.device())]}
    assert gpus.submit("in place", "allreduce", (_LARGE,), memory, dtype="float64").wait(LIMIT)
    assert (data.numpy() == 10).all()
    gpus.cuda.cudaStreamDestroy(stream)


def test_a_group_in_pieces(gpus):
    shapes = [3, 0, 20_000, 1, 30_001]
    data = [gpus.array(np.arange(n, dtype="float32") + gpus.rank) for n in shapes]
    outs = [gpus.array(np.zeros(n, "float32")) for n in shapes]
    begins = np.concatenate([[0], np.cumsum(shapes)]).tolist()
    memory = {
        "sources": [piece(a, b, n) for a, b, n in zip(data, begins, shapes)],
        "targets": [piece(a, b, n) for a, b, n in zip(outs, begins, shapes)],
    }
    assert gpus.submit("group", "allreduce", (sum(shapes),), memory, dtype="float32").wait(LIMIT)
    for n, out in zip(shapes, outs):
        np.testing.assert_array_equal(out.numpy(), 4 * np.arange(n) + 6)


@pytest.mark.parametrize("wire, expected", [("float16", [4, 12]), ("1bit", [2, 2])])
def test_what_travels_between_hosts_is_shortened(gpus, wire, expected):
    """With one bit for each element, both hosts send that it is above the threshold."""
    work, out = gpus.allreduce(f"wire {wire}", np.tile(np.array([1, 3], "float32"), 20_000), wire=wire)
    assert work.wait(LIMIT)
    np.testing.assert_array_equal(out.numpy(), np.tile(expected, 20_000))


def test_several_devices_of_a_rank_and_other_operations_go_through_host_memory(gpus):
    before = _calls(gpus)
    data, outs = [gpus.array(np.ones(_LARGE), i) for i in (0, 1)], [gpus.array(np.zeros(_LARGE), i) for i in (0, 1)]
    memory = {"inputs": [place(a) for a in data], "outputs": [place(a) for a in outs]}
    assert gpus.submit("devices", "allreduce", (_LARGE,), memory, dtype="float64").wait(LIMIT)
    assert all((out.numpy() == 8).all() for out in outs)
    memory = {"inputs": [place(data[0])], "outputs": [place(outs[0])]}
    assert gpus.submit("from 2", "broadcast", (_LARGE,), memory, dtype="float64", root=2).wait(LIMIT)
    assert (outs[0].numpy() == 1).all()
    assert (_calls(gpus) == before).all()


@pytest.mark.parametrize("other", [0, 3])
def test_ranks_with_other_numbers_of_arrays_find_one_road(gpus, other):
    """One rank has two replicas on two GPUs; with NCCL alone they would take part from both."""
    before = _calls(gpus)
    devices = (0, 1) if gpus.rank == other else (0,)
    data = [gpus.array(np.full(_LARGE, gpus.rank + 1.0), i) for i in devices]
    outs = [gpus.array(np.zeros(_LARGE), i) for i in devices]
    memory = {"inputs": [place(a) for a in data], "outputs": [place(a) for a in outs]}
    assert gpus.submit(f"numbers {other}", "allreduce", (_LARGE,), memory, dtype="float64").wait(LIMIT)
    assert all((out.numpy() == 10 + other + 1).all() for out in outs)
    assert (_calls(gpus) == before).all()
    work, out = gpus.allreduce(f"numbers {other}", np.ones(_LARGE))  # the next under the name is one of layers
    assert work.wait(LIMIT) and (out.numpy() == 4).all() and (_calls(gpus) > before).any()


@pytest.mark.parametrize("other", [1, 2])
def test_what_differs_or_is_refused_is_the_usual_error_on_all_ranks(gpus, other):
    def error_of(work) -> str:
        with pytest.raises(RuntimeError) as error:
            work.wait(LIMIT)
        return str(error.value)

    count = _LARGE + (gpus.rank == other)
    text = error_of(gpus.allreduce(f"shape {other}", np.zeros(count))[0])
    assert "differs between ranks" in text and f"rank {other} has" in text and "by NCCL within hosts" in text

    if gpus.rank == other:
        work = gpus.core.submit_allreduce(f"place {other}", [np.zeros(_LARGE)], [np.zeros(_LARGE)])
    else:
        work, _ = gpus.allreduce(f"place {other}", np.zeros(_LARGE))
    text = error_of(work)
    assert f"rank {other} has allreduce sum of float64 ({_LARGE},) on CPU" in text and "on GPU by NCCL within" in text

    data = gpus.array(np.zeros(_LARGE + 1))
    shifted = (data.pointer + 8 * (gpus.rank == other), data.device)
    memory = {"inputs": [place(data)], "outputs": [shifted]}
    text = error_of(gpus.submit(f"overlap {other}", "allreduce", (_LARGE,), memory, dtype="float64"))
    assert f"refused by rank {other}: its input and its output overlap in part" in text

    work, out = gpus.allreduce(f"shape {other}", np.ones(_LARGE))
    assert work.wait(LIMIT)
    assert (out.numpy() == 4).all()


@pytest.mark.parametrize("who", [0, 3])
def test_a_copy_that_fails_between_the_layers_is_an_error_on_all_ranks_and_the_rest_goes_on(gpus, gather, who):
    """This rank has summed within its host already, and its peer on the other host gets a refusal."""
    data, out = gpus.array(np.ones(_LARGE)), gpus.array(np.zeros(_LARGE))
    gather("made")
    if gpus.rank == who:
        gpus.cuda.standin_plant("cudaPointerGetAttributes", 1, 2)
    memory = {"inputs": [place(data)], "outputs": [place(out)]}
    work = gpus.submit(f"copy {who}", "allreduce", (_LARGE,), memory, dtype="float64")
    with pytest.raises(RuntimeError, match="^copy . was refused .*CUDA failed in cudaPointerGetAttributes") as error:
        work.wait(LIMIT)
    assert f"refused by rank {who}" in str(error.value)
    work, out = gpus.allreduce("rest", np.ones(_LARGE))
    assert work.wait(LIMIT)
    assert (out.numpy() == 4).all()


def test_sets_on_several_hosts_sum_in_layers_too(gpus):
    from mpi4py import MPI

    group = gpus.core.make_group(MPI.COMM_WORLD.py2f(), list(range(4)), {"gpu_hosts": "arena", "virtual_hosts": 2})
    before = gpus.calls("ncclAllGather")
    works = [gpus.allreduce(f"{g is None} {k}", np.full(80_000, k + 1.0), g) for k in range(6) for g in (None, group)]
    for number, (work, out) in enumerate(works):
        assert work.wait(LIMIT)
        assert (out.numpy() == 4 * (number // 2 + 1)).all()
    assert gpus.calls("ncclAllGather") == before + 12
    MPI.COMM_WORLD.Barrier()
    group.shutdown()
