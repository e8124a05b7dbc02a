"""Common code of tests of operations on GPUs: a rank's arrays, and their values in numpy. No MXNet."""

from __future__ import annotations

import hashlib
import time

import numpy as np
from harness import dtypes
from standin.gpu_support import Cuda, DeviceArray, Nccl

OPS = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}
EPSILON = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-6, "float64": 1e-14}
LIMIT = 20.0  # seconds for an operation


class Gpus:
    """This rank's GPUs and the core, for one test: arrays, operations on them, and results."""

    def __init__(self, core, rank: int, size: int, gather):
        self.core, self.rank, self.size, self.gather = core, rank, size, gather
        self.cuda, self.nccl = Cuda(), Nccl()
        self.arrays: list[DeviceArray] = []

    def device(self, index: int = 0) -> int:
        """The rank's GPU of that number; no two ranks have the same, if the machine has enough."""
        return self.cuda.at_hand(self.rank + index * self.size)

    def array(self, values, index: int = 0) -> DeviceArray:
        """Device memory with these values, until the end of the test."""
        self.arrays.append(DeviceArray(values, self.device(index), self.cuda))
        return self.arrays[-1]

    def submit(self, name, kind, like, memory, group=None, dtype=None, **options):
        """Post an operation on arrays of the shape and dtype of `like`."""
        shape = like if isinstance(like, tuple) else np.shape(like)
        dtype = dtype or str(np.asarray(like).dtype)
        rest = {"op": "sum", "scale": 1.0, "root": 0, "priority": 0, "label": "", "wire": "", **options}
        return (group or self.core).submit_on_gpu(name, kind, dtype, list(shape), memory, **rest)

    def allreduce(self, name, values, group=None, dtype=None, **options):
        """Post an allreduce of these values, which begins after a pause in a stream; returns (work, result)."""
        data, out = self.array(values), self.array(np.zeros_like(values))
        memory = {"inputs": [place(data)], "outputs": [place(out)]}
        return self.submit(name, "allreduce", values, memory, group, dtype, **options), out

    def calls(self, function: str) -> int:
        """How often a function of NCCL was called; 0 with the real one."""
        return self.nccl.standin_nccl_calls(function)

    def same_bits(self, *values: np.ndarray) -> None:
        """All ranks have these."""
        digest = hashlib.sha256(b"".join(np.ascontiguousarray(v).tobytes() for v in values)).hexdigest()
        assert len(set(self.gather(digest))) == 1


def place(array: DeviceArray):
    return (array.pointer, array.device)


def piece(array: DeviceArray, begin: int, count: int, skip: int = 0):
    """Elements [begin, begin + count) of the operation, which lie `skip` elements into the array."""
    return (begin, count, array.pointer + skip * array.dtype.itemsize, array.device)


def to_numbers(values, dtype: str) -> np.ndarray:
    """float64, or the integers themselves."""
    values = np.asarray(values)
    if dtype == "bfloat16":
        wide = values.astype(np.uint32).reshape(-1) << 16
        return wide.view(np.float32).astype(np.float64).reshape(values.shape)
    return values.astype(np.float64) if dtype.startswith("float") else values


def of_numbers(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        wide = values.astype(np.float32).reshape(-1).view(np.uint32) >> 16
        return wide.astype(np.uint16).reshape(values.shape)
    return values.astype(dtype)


def check_random_allreduces(gpus, seed: int, cases: int = 24) -> None:
    """Post allreduces in other orders on each rank, and compare their results with numpy's."""
    rng = np.random.RandomState(seed)
    posted = []
    for case in range(cases):
        dtype, op = str(rng.choice(dtypes.NCCL)), str(rng.choice(list(OPS)))
        exact = "float" not in dtype
        scale = 1.0 if exact or op != "sum" else float(rng.choice([1.0, 1 / gpus.size, 0.3]))
        shape = tuple(rng.randint(0, 40, rng.randint(0, 4))) if case else (70001,)
        values = [of_numbers(np.asarray(rng.randint(1, 4, shape)), dtype) for _ in range(gpus.size)]
        posted.append((case, dtype, op, scale, values))
    for number in np.random.RandomState(1000 * seed + gpus.rank).permutation(len(posted)):
        case, dtype, op, scale, values = posted[number]
        time.sleep(rng.choice([0, 0, 0.001]))
        work, out = gpus.allreduce(f"r{seed}/{case}", values[gpus.rank], dtype=dtype, op=op, scale=scale)
        posted[number] = (*posted[number], work, out)
    results = []
    for _, dtype, op, scale, values, work, out in posted:
        assert work.wait(LIMIT)
        results.append(out.numpy())
        expected = OPS[op].reduce([to_numbers(v, dtype) for v in values]) * (scale if scale != 1 else 1)
        got = to_numbers(results[-1], dtype)
        np.testing.assert_allclose(got, expected, rtol=EPSILON.get(dtype, 0), err_msg=f"{dtype} {op} {scale}")
    gpus.same_bits(*results)


# The beginning of a script of ranks in which something is made to fail: its indentation is that of a test's text.
FAILING = """
    import os, sys, threading, time, traceback
    import numpy as np
    from standin import gpu_support
    from standin.gpu_support import Cuda, DeviceArray, Nccl
    from compiled import core
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def fail(*error):
        traceback.print_exception(*error)
        world.Abort(1)

    sys.excepthook = fail
    rank = world.rank
    core.find_gpus([gpu_support.cuda_library()], [gpu_support.nccl_library()])
    cuda, nccl = Cuda(), Nccl()
    data = DeviceArray(np.ones(40000, "float32"), rank)

    def submit(name):
        place = [(data.pointer, rank)]
        return core.submit_on_gpu(name, "allreduce", "float32", [40000], {"inputs": place, "outputs": place}, "max")

    def left():
        return nccl.standin_nccl_live(), cuda.standin_live_streams(), cuda.standin_allocated(rank)

    def fly(options, waits):
        core.init(world.py2f(), options)
        works = [submit(f"flying {k}") for k in range(5)]
        if waits:
            assert all(work.wait(20) for work in works)
        core.shutdown()
        for work in works:
            try:
                assert work.wait(20)
            except RuntimeError as failure:
                assert "shut" in str(failure), failure

    def stall():
        core.begin_stall_watch()
        core.next_stalls(0.0, 0.5)
        core.end_stall_watch()

"""
