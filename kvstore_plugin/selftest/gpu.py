"""``python -m kvstore_plugin.selftest --gpu``: tests reductions of arrays on GPUs, and measures their speed.

It needs a GPU and the core, but neither MXNet nor another package for GPU arrays. Without a launcher it uses one GPU.
Under mpirun each rank uses its own GPU. If there are fewer GPUs than ranks, ranks share a GPU, which NCCL does not
allow: then the arrays go through host memory, as with MYKV_GPU=host.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from typing import Any, Callable

import numpy as np

from ..world import gpu_libraries, process
from ..world.own_gpus import own_gpus
from .cuda import DeviceArray, Stream, call

_DTYPES = ("float16", "float32", "float64", "int8", "uint8", "int16", "int32", "uint32", "int64", "uint64", "bool")
_SIZES = (0, 1, 1000, (1 << 20) + 3)
_OPS: dict[str, Callable] = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}
_SPEED_BYTES = (4 << 10, 1 << 20, 64 << 20, 256 << 20)
_TURNS = 10
_ORDER_ELEMENTS = 4 << 20
_NCCL_FLOAT32, _NCCL_SUM = 7, 0


def look(findings: Any) -> bool:
    """Report the CUDA and NCCL that were found. Returns whether there is a GPU to test."""
    found = gpu_libraries.find()
    facts = findings.facts
    for name, what, shown in (("cuda", "CUDA runtime", _cuda_version), ("nccl", "NCCL", _nccl_version)):
        one = found[name]
        facts[what] = f"{shown(one['version'])} in {one['path']}" if one["version"] else one["problem"]
    facts["CUDA of the driver"] = _cuda_version(found["driver"]) if found["driver"] else "there is no driver"
    facts["GPUs"] = str(found["devices"])
    if not found["devices"]:
        findings.wrong.append("There is no GPU: without --gpu the self-test tests everything else.")
        return False
    return True


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _nccl_version(number: int) -> str:
    """A version of NCCL as text. Only NCCL 2.9 and later use this encoding; mykv supports no older NCCL."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def check(findings: Any) -> None:
    """Test this rank's GPU together with the other ranks' GPUs: results, waiting for streams, speed."""
    device = own_gpus()[0]
    _, by_nccl, reason, _ = process.core.gpu_road()
    findings.facts["road of GPU arrays"] = "NCCL" if by_nccl else f"through host memory: {reason}"
    for dtype in _DTYPES:
        with findings.catching(f"operations on {dtype} on GPUs"):
            count = sum(_check_sizes(dtype, op, device) for op in _OPS)
            findings.facts[f"{dtype} on GPUs"] = f"{count} results equal numpy's"
    with findings.catching("order of streams"):
        _check_order(device)
        findings.facts["order of streams"] = "an operation waits for earlier work in the stream"
    with findings.catching("MXNet on GPUs"):
        _check_mxnet(findings, device)
    with findings.catching("speed of GPUs"):
        _measure(findings.facts, device, by_nccl)


def _values(dtype: str, count: int, rank: int) -> np.ndarray:
    """Small values, whose sums and products are exact in every dtype."""
    pattern = (np.arange(count) + rank) % 3
    return (pattern % 2 == 1) if dtype == "bool" else pattern.astype(dtype)


def _check_sizes(dtype: str, op: str, device: int) -> int:
    rank, size, core = process.rank(), process.size(), process.core
    checked = 0
    for count in _SIZES:
        every = [_values(dtype, count, other) for other in range(size)]
        expected = every[0]
        for other in every[1:]:
            expected = _OPS[op](expected, other)
        name = f"selftest/gpu/{dtype}/{op}/{count}"
        array = DeviceArray(every[rank], device)
        result = DeviceArray(np.zeros_like(every[rank]), device)
        memory = {"inputs": [array.pointer], "outputs": [result.pointer]}
        process.wait(core.submit_on_gpu(name, "allreduce", dtype, [count], memory, op))
        _require(np.array_equal(result.numpy(), expected.astype(dtype)), f"the {op} of {count} {dtype}")
        root = count % size
        memory = {"outputs": [result.pointer], **({"inputs": [array.pointer]} if rank == root else {})}
        process.wait(core.submit_on_gpu(f"{name}/broadcast", "broadcast", dtype, [count], memory, root=root))
        _require(np.array_equal(result.numpy(), every[root]), f"the broadcast of {count} {dtype}")
        array.close()
        result.close()
        checked += 2
    return checked


def _check_order(device: int) -> None:
    """Test that an operation waits for earlier work in its stream: here, for many copies of values into the array."""
    count, rank, size = _ORDER_ELEMENTS, process.rank(), process.size()
    source = DeviceArray(np.full(count, rank + 1, dtype="float32"), device)
    array = DeviceArray(np.zeros(count, dtype="float32"), device)
    stream = Stream(device)
    for turn in range(_TURNS):
        for _ in range(20):
            array.copy_from(source, stream)
        memory = {"inputs": [array.pointer], "outputs": [array.pointer], "streams": [(stream.address, device)]}
        process.wait(process.core.submit_on_gpu(f"selftest/gpu/order/{turn}", "allreduce", "float32", [count], memory))
        right = (array.numpy() == size * (size + 1) / 2).all()
        _require(right, "a sum of values written by earlier work in its stream")
    stream.close()
    source.close()
    array.close()


def _check_mxnet(findings: Any, device: int) -> None:
    """Test that MXNet computes on the GPU: its builds have kernels for some GPUs only."""
    from ..compat.mxnet import HAS_GPUS, MXNetError, mx  # here, since the self-test reports an MXNet that is missing

    if not HAS_GPUS:
        findings.facts["MXNet on GPUs"] = "this MXNet is built without CUDA"
        return
    try:
        right = (mx.nd.ones((2,), ctx=mx.gpu(device)).asnumpy() == 1).all()
    except MXNetError as error:
        if "no kernel image" not in str(error):
            raise
        findings.wrong.append(
            "MXNet cannot compute on this GPU: its build has no kernels for it. Build MXNet for the GPU's compute "
            "capability, or use a GPU that the build knows."
        )
        return
    _require(right, "an array of ones that MXNet makes on a GPU")
    findings.facts["MXNet on GPUs"] = "it computes"


def _require(right: bool, what: str) -> None:
    if not right:
        raise RuntimeError(f"{what} is wrong: report this, with the report above")


def _measure(facts: dict[str, str], device: int, by_nccl: bool) -> None:
    size = process.size()
    stream = Stream(device)
    direct = _DirectNccl(device) if by_nccl else None
    for nbytes in _SPEED_BYTES:
        count = nbytes // 4
        array, other = (DeviceArray(np.zeros(count, dtype="float32"), device) for _ in range(2))
        memory = {"inputs": [array.pointer], "outputs": [array.pointer]}
        name = f"selftest/gpu/speed/{nbytes}"

        def reduce(name: str = name, count: int = count, memory: dict = memory) -> Any:
            return process.core.submit_on_gpu(name, "allreduce", "float32", [count], memory)

        def copies(array: DeviceArray = array, other: DeviceArray = other) -> None:
            for _ in range(4):
                other.copy_from(array, stream)
            stream.wait()

        ours = _median(lambda reduce=reduce: process.wait(reduce()))
        copying = _median(copies)

        def both(reduce: Callable = reduce, copies: Callable = copies) -> None:
            work = reduce()
            copies()
            process.wait(work)

        text = f"{_speed(nbytes, ours)}; copied 4 times {_speed(4 * nbytes, copying)}; both at once "
        text += f"{_median(both) / (ours + copying):.2f} of the time of one after the other"
        if direct is not None:
            directly = _median(lambda array=array: direct.allreduce(array, stream))
            text += f"; NCCL called directly {_speed(nbytes, directly)}"
        facts[f"allreduce of {nbytes >> 10} KiB, {size} ranks"] = text
        array.close()
        other.close()
    if direct is not None:
        direct.close()
    stream.close()


def _speed(nbytes: int, seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms ({nbytes / seconds / 1e9:.1f} GB/s)"


def _median(function: Callable[[], Any]) -> float:
    function()
    times = []
    for _ in range(_TURNS):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


class _DirectNccl:
    """Calls NCCL without the core, to compare the speed; its communicator has all ranks."""

    def __init__(self, device: int) -> None:
        from mpi4py import MPI

        self._library = ctypes.CDLL(gpu_libraries.find()["nccl"]["path"])
        self._comm = ctypes.c_void_p()
        unique = _UniqueId()
        if process.rank() == 0:
            self._call("ncclGetUniqueId", ctypes.byref(unique))
        ctypes.memmove(ctypes.byref(unique), MPI.COMM_WORLD.bcast(bytes(unique)), ctypes.sizeof(unique))
        call("cudaSetDevice", device)
        self._call("ncclCommInitRank", ctypes.byref(self._comm), process.size(), unique, process.rank())

    def _call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._library, function)(*arguments)
        if code:
            raise RuntimeError(f"{function} called directly failed with NCCL's code {code}")

    def allreduce(self, array: DeviceArray, stream: Stream) -> None:
        pointer, count = ctypes.c_void_p(array.address), ctypes.c_size_t(array.nbytes // 4)
        handle = ctypes.c_void_p(stream.address)
        self._call("ncclAllReduce", pointer, pointer, count, _NCCL_FLOAT32, _NCCL_SUM, self._comm, handle)
        stream.wait()

    def close(self) -> None:
        self._call("ncclCommDestroy", self._comm)
