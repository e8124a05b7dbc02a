"""The stand-in for libnccl: results, order, and failures of communicators of one to four processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from standin import gpu_support
from standin.gpu_support import Cuda, DeviceArray, Nccl, NcclError

_LIMIT = 40.0  # seconds for all ranks of a test; the slowest takes 2
_WHILE = 0.3  # seconds after which what has not happened is taken not to happen
_TYPES = ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16"]


def _run(name: str, size: int, expect: dict[int, int] | None = None, **settings) -> str:
    """Run a function of this file as `size` processes; returns what they wrote. `expect`: exit codes by rank."""
    unique_id = _ids().unique_id().hex()
    env = {**os.environ, **gpu_support.environment(**{"devices": max(size, 2), **settings})}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, name, str(rank), str(size), unique_id],
            env={**env, "PYTHONPATH": str(Path(__file__).parents[1])},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    watch = threading.Timer(_LIMIT, lambda: [process.kill() for process in processes])
    watch.start()
    try:
        output = [process.communicate()[0] for process in processes]
    finally:
        watch.cancel()
        for process in processes:
            process.kill()
            process.wait()
    codes = {rank: process.returncode for rank, process in enumerate(processes)}
    assert codes == {**dict.fromkeys(codes, 0), **(expect or {})}, "\n".join(output)
    return "\n".join(output)


def _ids() -> Nccl:
    return Nccl(gpu_support.nccl_library())


class _Rank:
    """What a process of a test has: the libraries, a communicator on the device of its rank, and a stream."""

    def __init__(self, rank: int, size: int, unique_id: bytes, blocking: bool = True, device: int | None = None):
        self.rank, self.size, self.nccl, self.cuda = rank, size, Nccl(), Cuda()
        self.device = rank if device is None else device
        self.cuda.cudaSetDevice(self.device)
        self.stream = self.cuda.stream()
        self.unique_id = unique_id
        self.comm = self.nccl.comm(size, unique_id, rank, blocking)

    def array(self, values) -> DeviceArray:
        return DeviceArray(values, self.device, self.cuda)

    def allreduce(self, array: DeviceArray, op: int = Nccl.SUM, dtype: int = Nccl.FLOAT32, comm=None, stream=None):
        count = array.nbytes // array.dtype.itemsize
        where = (comm or self.comm, stream or self.stream)
        return self.nccl.ncclAllReduce(array.pointer, array.pointer, count, dtype, op, *where)

    def done(self, stream=None) -> bool:
        return self.cuda.code("cudaStreamQuery", stream or self.stream) == 0

    def wait(self) -> None:
        self.cuda.cudaStreamSynchronize(self.stream)

    def second_comm(self) -> ctypes.c_void_p:
        """A communicator over the same ranks; its id travels by the first."""
        mine = np.frombuffer(self.nccl.unique_id(), np.uint8)
        shared = self.array(mine)
        self.nccl.ncclBroadcast(shared.pointer, shared.pointer, 128, Nccl.UINT8, 0, self.comm, self.stream)
        self.wait()
        return self.nccl.comm(self.size, shared.numpy().tobytes(), self.rank)


def _to_bfloat16(values) -> np.ndarray:
    bits = np.asarray(values, "float32").view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _encode(values, dtype: str) -> np.ndarray:
    return _to_bfloat16(values) if dtype == "bfloat16" else np.asarray(values).astype(dtype)


def _decode(values, dtype: str) -> np.ndarray:
    return (values.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else values


def _values(rank: int, count: int, dtype: str) -> np.ndarray:
    """Values of a rank as their dtype holds them; of the floating ones, sums are rounded."""
    random = np.random.RandomState(rank)
    if "float" in dtype:
        return _decode(_encode(random.uniform(-3, 3, count), dtype), dtype)
    return random.randint(0 if dtype[0] == "u" else -9, 12, count).astype(dtype)


def _reduced(op: int, all_values: list[np.ndarray], dtype: str) -> np.ndarray:
    """In rank order; float16 and bfloat16 in float32."""
    wide = [v.astype("float32") if dtype in ("float16", "bfloat16") else v for v in all_values]
    if op == Nccl.AVG and "float" in dtype:
        wide = [value * wide[0].dtype.type(1 / len(wide)) for value in wide]
    total = wide[0]
    for value in wide[1:]:
        function = {Nccl.PROD: np.multiply, Nccl.MAX: np.maximum, Nccl.MIN: np.minimum}.get(op, np.add)
        total = function(total, value)
    if op == Nccl.AVG and "float" not in dtype:
        total = np.trunc(total.astype("float64") / len(wide))
    return _encode(total, dtype)


def collectives(rank, size, unique_id):
    me = _Rank(rank, size, unique_id)
    count = 37
    for code, dtype in enumerate(_TYPES):
        all_values = [_values(other, count * size, dtype) for other in range(size)]
        for op in range(5) if dtype in ("int32", "float16", "float32") else (Nccl.SUM, Nccl.AVG):
            array = me.array(_encode(all_values[rank], dtype))
            me.allreduce(array, op, code)
            part = me.array(_encode(np.zeros(count), dtype))
            send = me.array(_encode(all_values[rank], dtype))
            me.nccl.ncclReduceScatter(send.pointer, part.pointer, count, code, op, me.comm, me.stream)
            root = size - 1
            me.nccl.ncclReduce(send.pointer, send.pointer, count * size, code, op, root, me.comm, me.stream)
            me.wait()
            expected = _reduced(op, all_values, dtype)
            np.testing.assert_array_equal(array.numpy(), expected, f"{dtype} {op}")
            np.testing.assert_array_equal(part.numpy(), expected[rank * count : (rank + 1) * count])
            wanted = expected if rank == root else _encode(all_values[rank], dtype)
            np.testing.assert_array_equal(send.numpy(), wanted)
            for one in (array, part, send):
                one.free()
    # More than the ranks show each other at a time, in place, at odd places.
    count = 700_001
    whole = me.array(np.concatenate([np.full(count, other == rank, "float32") * (rank + 1) for other in range(size)]))
    mine = whole.pointer + rank * count * 4
    me.nccl.ncclAllGather(mine, whole.pointer, count, Nccl.FLOAT32, me.comm, me.stream)
    me.wait()
    np.testing.assert_array_equal(whole.numpy(), np.repeat(np.arange(1, size + 1, dtype="float32"), count))
    me.nccl.ncclReduceScatter(whole.pointer, mine, count, Nccl.FLOAT32, Nccl.SUM, me.comm, me.stream)
    me.nccl.ncclBroadcast(mine, mine, count, Nccl.FLOAT32, 0, me.comm, me.stream)
    me.wait()
    assert (whole.numpy()[rank * count : (rank + 1) * count] == size).all() or rank != 0
    op, scalar = ctypes.c_int(), ctypes.c_float(rank + 0.5)
    me.nccl.ncclRedOpCreatePreMulSum(ctypes.byref(op), ctypes.byref(scalar), Nccl.FLOAT32, 1, me.comm)
    array = me.array(np.ones(3, "float32"))
    me.allreduce(array, op.value)
    me.nccl.ncclRedOpDestroy(op, me.comm)
    me.wait()
    assert (array.numpy() == sum(other + 0.5 for other in range(size))).all()
    me.nccl.ncclCommFinalize(me.comm)
    me.nccl.ncclCommDestroy(me.comm)
    assert me.cuda.violations() == [] and me.nccl.standin_nccl_live() == 0


def messages(rank, size, unique_id):
    me = _Rank(rank, size, unique_id)
    count = 100_003  # several pieces
    send, got = me.array(np.full(count, rank, "float32")), me.array(np.zeros((size, count), "float32"))
    me.nccl.ncclGroupStart()
    for peer in range(size):  # with itself too
        me.nccl.ncclSend(send.pointer, count, Nccl.FLOAT32, peer, me.comm, me.stream)
        me.nccl.ncclRecv(got.pointer + peer * count * 4, count, Nccl.FLOAT32, peer, me.comm, me.stream)
    assert me.done()
    me.nccl.ncclGroupEnd()
    me.wait()
    assert (got.numpy() == np.arange(size)[:, None]).all()
    if rank < 2:  # without the others, and not before the other one has come
        time.sleep(_WHILE * rank)
        begin = time.monotonic()
        if rank == 0:
            me.nccl.ncclSend(send.pointer, 5, Nccl.FLOAT32, 1, me.comm, me.stream)
        else:
            me.nccl.ncclRecv(send.pointer, 5, Nccl.FLOAT32, 0, me.comm, me.stream)
        me.wait()
        assert rank or time.monotonic() - begin > _WHILE / 2
        assert (send.numpy()[:5] == 0).all()


def order(rank, size, unique_id):
    me = _Rank(rank, size, unique_id)
    one, two = me.comm, me.second_comm()
    other = me.cuda.stream()
    array, second = me.array(np.ones(3, "float32")), me.array(np.ones(3, "float32"))
    for _ in range(20):  # the same order on streams that know nothing of each other
        me.allreduce(array, Nccl.MAX, comm=one)
        me.allreduce(second, Nccl.MAX, comm=two, stream=other)
    me.wait()
    me.cuda.cudaStreamSynchronize(other)
    comms = [one, two] if rank == 0 else [two, one]
    for comm, stream in zip(comms, [me.stream, other]):
        me.allreduce(array, comm=comm, stream=stream)
    time.sleep(_WHILE)
    assert not me.done() and not me.done(other)
    assert me.nccl.async_error(one) == 0
    time.sleep(3 * _WHILE)  # the other rank may be late with its look
    for comm in comms:
        me.nccl.ncclCommAbort(comm)
    me.wait()  # once one rank has aborted, the other communicator's operation may even come to its end
    me.cuda.cudaStreamSynchronize(other)


def mismatch(rank, size, unique_id):
    me = _Rank(rank, size, unique_id)
    array = me.array(np.ones(8, "float32"))
    me.nccl.ncclAllReduce(array.pointer, array.pointer, 8 - (rank == 1), Nccl.FLOAT32, Nccl.SUM, me.comm, me.stream)
    me.wait()
    assert len(me.cuda.violations()) == 1 and "8 elements" in me.cuda.violations()[0]
    assert me.nccl.async_error(me.comm) == Nccl.INVALID_USAGE
    with pytest.raises(NcclError):
        me.allreduce(array)
    me.nccl.ncclCommAbort(me.comm)


def duplicate(rank, size, unique_id):
    with pytest.raises(NcclError, match="Duplicate GPU detected : rank . and rank . both on CUDA device 11000") as got:
        _Rank(rank, size, unique_id, device=1)
    assert got.value.code == Nccl.INVALID_USAGE


def not_blocking(rank, size, unique_id):
    looked = Path(os.environ["LOOKED"])  # rank 1 comes when rank 0 has looked at the state of its communicator
    while rank == 1 and not looked.exists():
        time.sleep(0.01)
    me = _Rank(rank, size, unique_id, blocking=False)

    def settle():
        while me.nccl.async_error(me.comm) == Nccl.IN_PROGRESS:
            time.sleep(0.001)
        assert me.nccl.async_error(me.comm) == 0

    if rank == 0:
        assert me.nccl.async_error(me.comm) == Nccl.IN_PROGRESS
        with pytest.raises(NcclError, match="previous operation"):
            me.nccl.ncclCommCount(me.comm, ctypes.byref(ctypes.c_int()))
        looked.touch()
    settle()
    array = me.array(np.ones(8, "float32"))
    codes = []
    for _ in range(12):
        me.wait()
        codes.append(me.allreduce(array, Nccl.MAX))
        if codes[-1] == Nccl.IN_PROGRESS:
            assert me.done()  # not yet in the stream
            settle()
    assert codes[0] == Nccl.IN_PROGRESS and set(codes) == {0, Nccl.IN_PROGRESS}
    assert me.nccl.ncclCommFinalize(me.comm) == Nccl.IN_PROGRESS
    settle()
    assert me.done()
    me.nccl.ncclCommDestroy(me.comm)


def peer_dies(rank, size, unique_id):
    me = _Rank(rank, size, unique_id)
    array = me.array(np.ones(8, "float32"))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    me.allreduce(array)
    begin = time.monotonic()
    error = 0
    while not error and time.monotonic() < begin + (10 if "STANDIN_NCCL_REMOTE_ERROR" in os.environ else 2 * _WHILE):
        error = me.nccl.async_error(me.comm)
        time.sleep(0.01)
    print("async error", error, "done", me.done())
    me.nccl.ncclCommAbort(me.comm)
    me.wait()


def planted(rank, size, unique_id):
    me = _Rank(rank, size, unique_id)
    array = me.array(np.ones(8, "float32"))
    with pytest.raises(NcclError, match="planted"):  # by the environment
        me.allreduce(array)
    me.allreduce(array)  # hangs
    time.sleep(_WHILE)
    assert not me.done()
    me.nccl.standin_nccl_resume()
    me.wait()
    assert (array.numpy() == size).all()
    if rank == 0:
        me.nccl.standin_nccl_plant("async", 1, Nccl.REMOTE_ERROR)
    me.allreduce(array)
    time.sleep(_WHILE)
    assert not me.done()
    assert me.nccl.async_error(me.comm) == (Nccl.REMOTE_ERROR if rank == 0 else 0)
    assert me.nccl.standin_nccl_calls("ncclAllReduce") == 3
    me.nccl.ncclCommAbort(me.comm)
    me.wait()


def devices_of_one_process(rank, size, unique_id):
    nccl, cuda = Nccl(), Cuda()
    comms, arrays, streams = [], [], []
    nccl.ncclGroupStart()
    for device in range(3):
        cuda.cudaSetDevice(device)
        comms.append(ctypes.c_void_p())
        nccl.ncclCommInitRank(ctypes.byref(comms[-1]), 3, gpu_support.UniqueId.from_buffer_copy(unique_id), device)
    nccl.ncclGroupEnd()
    nccl.ncclGroupStart()
    for device in range(3):
        cuda.cudaSetDevice(device)
        streams.append(cuda.stream())
        arrays.append(DeviceArray(np.full(4, device + 1, "int32"), device, cuda))
        pointer = arrays[-1].pointer
        nccl.ncclAllReduce(pointer, pointer, 4, Nccl.INT32, Nccl.SUM, comms[device], streams[device])
    cuda.cudaSetDevice(0)
    nccl.ncclGroupEnd()
    for device in range(3):
        cuda.cudaStreamSynchronize(streams[device])
        assert (arrays[device].numpy() == 6).all()
    pointer = arrays[1].pointer
    with pytest.raises(NcclError, match="not a pointer to memory of device 0"):
        nccl.ncclAllReduce(pointer, pointer, 4, Nccl.INT32, Nccl.SUM, comms[0], streams[0])
    for comm in comms:
        nccl.ncclCommDestroy(comm)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_collectives_give_what_numpy_gives(size):
    _run("collectives", size, delay_us=0)


def test_messages_go_between_pairs():
    _run("messages", 3)


def test_different_orders_of_launch_hang_until_abort():
    _run("order", 2)


def test_operations_that_differ_are_told():
    assert _run("mismatch", 3).count("stand-in, process") == 3


def test_two_ranks_on_one_gpu_are_refused():
    _run("duplicate", 2)


def test_without_blocking_all_is_in_progress_for_a_while(monkeypatch, tmp_path):
    monkeypatch.setenv("LOOKED", str(tmp_path / "looked"))
    _run("not_blocking", 2, delay_us=0, nccl_launch_us=200_000)


@pytest.mark.parametrize("told", [False, True])
def test_the_death_of_a_rank_is_a_hang_or_an_error(told):
    settings = {"nccl_remote_error": 1} if told else {}
    output = _run("peer_dies", 2, {1: -signal.SIGKILL}, **settings)
    assert f"async error {6 if told else 0} done False" in output


def test_planted_failures_strike():
    _run("planted", 2, nccl_plant="ncclAllReduce:1:3,hang:1:1")


def test_devices_of_one_process_meet_in_a_group():
    _run("devices_of_one_process", 1, devices=3)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        globals()[sys.argv[1]](int(sys.argv[2]), int(sys.argv[3]), bytes.fromhex(sys.argv[4]))
