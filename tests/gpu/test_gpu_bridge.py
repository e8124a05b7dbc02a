"""MXNet's arrays on GPUs, as far as the bridge to its engine goes: with a stand-in for libmxnet (gpu_support.Mxnet), by
NCCL, through host memory, and on the CPU. What comes out is compared with numpy."""

from __future__ import annotations

import time

import numpy as np
import pytest
from harness.marks import needs_standin
from standin import gpu_support
from standin.gpu_support import ON_REAL_GPU, Cuda, DeviceArray, Mxnet, Nccl

_ENV = {"MYKV_TEST_POOL": "nccl"}
_TWO_HOSTS = {"MYKV_TEST_POOL": "nccl", "MYKV_VIRTUAL_HOSTS": "2"}


class Arrays:
    """This rank's arrays for one test, and the group that works on them."""

    def __init__(self, core, group, road: str, rank: int, size: int):
        self.core, self.group, self.road, self.rank, self.size = core, group, road, rank, size
        self.cuda, self.nccl, self.mxnet = Cuda(), Nccl(), Mxnet()
        self.memory: dict[int, DeviceArray | np.ndarray] = {}

    def make(self, values) -> int:
        """Handle of an array with these values, where those of this road lie."""
        values = np.ascontiguousarray(values)
        memory = values.copy() if self.road == "cpu" else DeviceArray(values, self.rank, self.cuda)
        handle = self.mxnet.array(memory)
        self.memory[handle] = memory
        return handle

    def values(self, handle: int) -> np.ndarray:
        """What an array holds when all that was pushed is done."""
        assert self.mxnet.wait(handle) == ""
        memory = self.memory[handle]
        return memory if self.road == "cpu" else memory.numpy()

    def push(self, call: str, name: str, *arguments, **options) -> None:
        getattr(self.group, f"push_{call}")(f"{self.road} {name}", *arguments, **options)

    def free(self) -> None:
        self.mxnet.free()
        for memory in self.memory.values():
            if isinstance(memory, DeviceArray):
                memory.free()
        assert self.cuda.violations() == []


@pytest.fixture(params=["nccl", "staged", "cpu"])
def arrays(request, rank, size):
    from mpi4py import MPI

    core = gpu_support.start_core(request, by_nccl=request.param == "nccl")
    # A group has its own way; this one is of all ranks.
    own = request.param == "staged"
    group = core
    if own:
        options = {"gpu": "host", "virtual_hosts": len(core.host_ranks())}
        group = core.make_group(MPI.COMM_WORLD.py2f(), list(range(size)), options)
    made = Arrays(core, group, request.param, rank, size)
    yield made
    made.free()
    if own:
        MPI.COMM_WORLD.Barrier()
        group.shutdown()


def _check_alltoall(arrays):
    size, rank = arrays.size, arrays.rank
    for case, dtype in enumerate(["float32", "int8", "bool", "float64"]):
        rows = np.random.RandomState(case).randint(0, 5, (size, size)) * (case != 3)
        if case == 1:
            rows[0] = 0  # rank 0 sends nothing
        every = [np.random.RandomState(10 * case + r).randint(0, 2, (rows[r].sum(), 3, 2)) for r in range(size)]
        begins = np.concatenate([np.zeros((size, 1), int), np.cumsum(rows, axis=1)], axis=1)
        kept = [every[s][begins[s, rank] : begins[s, rank + 1]] for s in range(size)]
        before = [arrays.nccl.standin_nccl_calls(call) for call in ("ncclSend", "ncclRecv", "ncclBroadcast")]
        data, out = arrays.make(every[rank].astype(dtype)), arrays.make(np.zeros((rows[:, rank].sum(), 3, 2), dtype))
        arrays.push("alltoall", f"all {case}", data, out, rows.tolist())
        np.testing.assert_array_equal(arrays.values(out), np.concatenate(kept).astype(dtype))
        np.testing.assert_array_equal(arrays.values(data), every[rank].astype(dtype))
        after = [arrays.nccl.standin_nccl_calls(call) for call in ("ncclSend", "ncclRecv", "ncclBroadcast")]
        by_nccl = arrays.road == "nccl"
        wanted = [by_nccl * np.count_nonzero(rows[rank]), by_nccl * np.count_nonzero(rows[:, rank]), 0]
        assert ON_REAL_GPU or [b - a for a, b in zip(before, after)] == wanted


@pytest.mark.ranks(2, 3, env=_ENV)
def test_alltoall(arrays):
    """By NCCL it is one operation of sends and receives; rows may be many, few or none."""
    _check_alltoall(arrays)


@pytest.mark.ranks(4, env=_TWO_HOSTS)
def test_alltoall_between_hosts(arrays):
    _check_alltoall(arrays)


@pytest.mark.ranks(2, 3, env=_ENV)
def test_the_other_collective_operations(arrays):
    size, rank = arrays.size, arrays.rank
    rows = [3, 1, 0, 2][:size]
    whole = np.arange(12.0 * size).reshape(2 * size, 6)
    total = sum(whole * (r + 1) for r in range(size))

    data, outs = arrays.make(whole * (rank + 1)), [arrays.make(np.zeros_like(whole)) for _ in range(2)]
    arrays.push("allreduce", "sum", [data], outs, scale=0.5)
    for out in outs:
        np.testing.assert_array_equal(arrays.values(out), total / 2)

    data, out = arrays.make(whole * (rank + 1)), arrays.make(np.zeros_like(whole))
    arrays.push("broadcast", "copy", data, [out], root=1)
    np.testing.assert_array_equal(arrays.values(out), whole * 2)

    group = [np.full(5, rank + 1.0), np.full((2, 3), rank + 1, "float32"), np.full(4, rank + 2.0)]
    datas, outs = [arrays.make(one) for one in group], [arrays.make(np.zeros_like(one)) for one in group]
    arrays.push("group", "some", datas, outs)
    sums = [size * (size + 1) / 2] * 2 + [size * (size + 3) / 2]
    for out, one, expected in zip(outs, group, sums):
        np.testing.assert_array_equal(arrays.values(out), np.full_like(one, expected))

    data, out = arrays.make(np.full((rows[rank], 2), rank)), arrays.make(np.zeros((sum(rows), 2), int))
    arrays.push("allgather", "rows", data, out, rows)
    np.testing.assert_array_equal(arrays.values(out), np.repeat([[r, r] for r in range(size)], rows, axis=0))

    data, out = arrays.make(whole * (rank + 1)), arrays.make(np.zeros((2, 6)))
    arrays.push("reducescatter", "own rows", data, out)
    np.testing.assert_array_equal(arrays.values(out), total[2 * rank : 2 * rank + 2])

    division = [(0, 6 * r * 2, 12, r) for r in range(size)]
    data, own = arrays.make(whole * (rank + 1)), arrays.make(np.zeros(12))
    arrays.push("reduce_to_owners", "owned", [data], division, [own])
    np.testing.assert_array_equal(arrays.values(own), total.ravel()[12 * rank : 12 * rank + 12])
    arrays.push("gather_from_owners", "shown", [data], division)
    own_rows = np.concatenate([whole.ravel()[12 * r : 12 * r + 12] * (r + 1) for r in range(size)])
    np.testing.assert_array_equal(arrays.values(data), own_rows.reshape(whole.shape))


@pytest.mark.ranks(2, env=_ENV)
@pytest.mark.parametrize("arrays", ["nccl", "staged"], indirect=True)
def test_on_start_comes_before_the_data_is_touched(arrays):
    """The engine of MXNet 2.0 may call an operation before kernels that write its arrays have run ("Async")."""
    arrays.cuda.cudaSetDevice(arrays.cuda.at_hand(arrays.rank))
    stream, started = arrays.cuda.stream(), []
    late, data, out = (arrays.make(values) for values in (np.full(1000, 1.0), np.zeros(1000), np.zeros(1000)))

    def wait_for_kernels():
        started.append(arrays.cuda.code("cudaStreamSynchronize", stream))

    arrays.mxnet = Mxnet(2, wait_for_kernels)
    arrays.mxnet.made = list(arrays.memory)
    arrays.cuda.delay(arrays.rank, stream, 100000)
    arrays.cuda.cudaMemcpyAsync(arrays.memory[data].pointer, arrays.memory[late].pointer, 8000, 3, stream)
    arrays.push("allreduce", "late", [data], [out])
    assert (arrays.values(out) == arrays.size).all()
    assert started == [0]
    # A worker of the engine's for the CPU runs it: one that may wait there.
    library = arrays.mxnet.library
    assert (library.standin_mx_last_property(), library.standin_mx_last_device_type()) == (Mxnet.PRIORITIZED, Mxnet.CPU)
    arrays.cuda.cudaStreamDestroy(stream)


@pytest.mark.ranks(2, env=_ENV)
@pytest.mark.parametrize("arrays", ["nccl", "staged"], indirect=True)
def test_an_array_that_carries_an_error_is_an_error_on_all_ranks(arrays):
    for call in ("allreduce", "alltoall"):
        data, out = arrays.make(np.ones((2, 2))), arrays.make(np.zeros((2, 2)))
        if arrays.rank == 1:
            arrays.mxnet.spoil(data, "an operation before")
        if call == "allreduce":
            arrays.push(call, "spoiled", [data], [out])
        else:
            arrays.push(call, "spoiled too", data, out, [[1, 1], [1, 1]])
        text = arrays.mxnet.wait(out)
        assert ("refused by rank 1" in text) if arrays.rank == 0 else (text == "an operation before"), text
    data, out = arrays.make(np.ones((2, 2))), arrays.make(np.zeros((2, 2)))
    arrays.push("alltoall", "well", data, out, [[1, 1], [1, 1]])
    assert (arrays.values(out) == 1).all()


@pytest.mark.ranks(2, env=_ENV)
@pytest.mark.parametrize("arrays", ["cpu"], indirect=True)  # on GPUs the core's thread alone ends them
def test_operations_fail_one_after_another(arrays):
    """MXNet's engine changes its list of errors without a lock, though the threads that tell it of them are several."""
    before = arrays.mxnet.library.standin_mx_errors_at_once()
    made = [arrays.make(np.ones(4 + arrays.rank)) for _ in range(40)]
    for number, one in enumerate(made):
        arrays.push("allreduce", f"failing {number}", [one], [one])
    for one in made:
        assert "differs between ranks" in arrays.mxnet.wait(one)
    assert arrays.mxnet.library.standin_mx_errors_at_once() == before
    array = arrays.make(np.ones(4))  # the next operation releases the arrays of those that have failed
    arrays.push("allreduce", "next", [array], [array])
    assert (arrays.values(array) == 2).all()


@pytest.mark.ranks(2, env=_ENV)
@pytest.mark.parametrize("arrays", ["nccl", "cpu"], indirect=True)
@pytest.mark.parametrize("how", [1, 2])
def test_an_operation_that_the_engine_does_not_take_is_an_error_on_all_ranks(arrays, how):
    """Its turn is taken, so the others would wait for it, and later ones of its name would be crossed."""
    data, out = arrays.make(np.ones(4)), arrays.make(np.zeros(4))
    if arrays.rank == 1:
        arrays.mxnet.fail_to_push(how)
        with pytest.raises(RuntimeError, match="MXNet's engine did not accept the operation: MXEnginePushAsyncND"):
            arrays.push("allreduce", "not taken", [data], [out])
    else:
        arrays.push("allreduce", "not taken", [data], [out])
        assert "refused by rank 1" in arrays.mxnet.wait(out)
    data, out = arrays.make(np.ones(4)), arrays.make(np.zeros(4))
    arrays.push("allreduce", "not taken", [data], [out])
    assert (arrays.values(out) == 2).all()


@needs_standin("memory of other ranks on the same GPU comes and goes")
@pytest.mark.ranks(2, env=_ENV)
@pytest.mark.parametrize("arrays", ["staged"], indirect=True)
def test_memory_that_goes_with_its_last_operation_is_not_freed_in_the_cores_thread(arrays, gather):
    """cudaFree waits for all that the GPU has to do, and this thread is the one that must not wait."""
    before = arrays.cuda.standin_allocated(arrays.rank)
    memory = arrays.core.GpuMemory(arrays.rank, 4000)
    bucket = arrays.core.PreparedBucket("going", arrays.group, memory, 0, 1000, "float32", "", [])
    gather("both have it")
    if arrays.rank == 0:
        stream = arrays.cuda.stream()
        bucket.push("")
        del bucket, memory
        arrays.cuda.delay(arrays.rank, stream, 1_000_000)
        gather("rank 0 has let go")
        end = time.monotonic() + 10
        while arrays.cuda.standin_allocated(arrays.rank) > before and time.monotonic() < end:
            time.sleep(0.01)
        assert arrays.cuda.standin_allocated(arrays.rank) == before
        arrays.cuda.cudaStreamDestroy(stream)
    else:
        gather("rank 0 has let go")
        bucket.push("")
        del bucket, memory
    gather("both are through")
