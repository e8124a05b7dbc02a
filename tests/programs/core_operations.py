"""Every operation of the core among the ranks of several hosts, for test_namespaces.py; MXNet is not imported.

Prints "fine RANK" at the end. Its argument is JSON: `hosts`, the ranks of each host that there should be; `options` of
the core; `late`: whether to measure what waiting for another host takes.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib

import numpy as np
from compiled import core

os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")  # as importing the package does: ranks outnumber the cores
from mpi4py import MPI

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
_COMPRESS_BYTES = 4096
_DTYPES = ["float16", "float32", "float64", "int8", "uint8", "int32", "int64"]
_FUNCTIONS = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}
_WIRES = ["float16", "bfloat16", "2bit threshold=0.5", "topk k=0.01", "onebit", "randomk k=0.1", "dithering k=7"]
_MOST_OF_A_CORE = 0.1  # sleeping takes 0.01 to 0.1 on a busy machine, spinning takes all that it can get
_MOST_TRIES = 10
_WAIT_S = 60.0


def main() -> None:
    """Refuse what differs, then run everything."""
    given = json.loads(sys.argv[1])
    other_versions(given["options"])
    core.init(COMM.py2f(), {**given["options"], "compress_bytes": _COMPRESS_BYTES})
    places(given["hosts"])
    small_and_large()
    broadcasts()
    buckets()
    compressed(len(given["hosts"]) > 1)
    in_any_order()
    disagreement()
    part_of_the_ranks()
    if given["late"]:
        waiting()
    COMM.barrier()
    core.shutdown()
    print("fine", RANK, flush=True)


def other_versions(options: dict) -> None:
    """Ranks of other versions do not start, and all are told which."""
    odd = RANK == SIZE - 1
    versions = {"mykv": "9.9" if odd else "1.0"}
    try:
        core.init(COMM.py2f(), {**options, "versions": versions})
    except core.Error as error:
        assert f"rank 0 has mykv 1.0 and rank {SIZE - 1} has mykv 9.9" in str(error), error
    else:
        raise AssertionError("ranks of different versions have started together")


def places(hosts: list[list[int]]) -> None:
    """Ranks that share memory are a host."""
    assert core.host_ranks() == hosts, core.host_ranks()
    mine = next(ranks for ranks in hosts if RANK in ranks)
    assert (core.local_rank(), core.local_size()) == (mine.index(RANK), len(mine))
    assert not core.why_memory_is_not_shared()


def small_and_large() -> None:
    """Sums and other reductions of every dtype, from no element to many parts."""
    for dtype in _DTYPES:
        for count in (0, 1, 1003):
            expect(f"{dtype} {count}", [values(rank, count, dtype) for rank in range(SIZE)])
    for op in _FUNCTIONS:
        expect(op, [values(rank, 501, "int64") for rank in range(SIZE)], op)
    large = [np.random.RandomState(rank).randn((3 << 20) // 4 + 17).astype("float32") for rank in range(SIZE)]
    array = large[RANK].copy()
    wait(core.submit_allreduce("large", [array], [array], scale=1 / SIZE))
    np.testing.assert_allclose(array, np.mean(large, axis=0, dtype="float64"), atol=1e-6)
    same_bits(array)


def broadcasts() -> None:
    """From every rank, small ones and one of several parts."""
    for root in range(SIZE):
        for count in (0, 7, (1 << 20) + 3):
            array = values(RANK, count, "int32")
            wait(core.submit_broadcast(f"broadcast {count}", array, [array], root))
            np.testing.assert_array_equal(array, values(root, count, "int32"))


def buckets() -> None:
    """Reduced where they lie, twice, with what lies before them left alone."""
    count = (2 << 20) // 4 + 5
    buffer = core.allocate(4 * (count + 1))
    bucket = np.frombuffer(buffer, "float32")
    for turn in range(2):
        bucket[0] = -1
        bucket[1:] = values(RANK + turn, count)
        wait(core.submit_bucket("bucket", buffer, 1, count, "float32"))
        np.testing.assert_array_equal(bucket[1:], sum(values(rank + turn, count) for rank in range(SIZE)))
        assert bucket[0] == -1


def compressed(loses: bool) -> None:
    """Every rank gets the same bits, which between hosts are not those of the sum; what is lost comes later."""
    for wire in _WIRES:
        own = [np.random.RandomState(rank).randn(20_000).astype("float32") for rank in range(SIZE)]
        total = np.zeros(20_000)
        for _ in range(3):
            array = own[RANK].copy()
            wait(core.submit_allreduce(wire, [array], [array], wire=wire))
            same_bits(array)
            total += array
        exact = np.allclose(array, np.sum(own, axis=0), rtol=1e-6, atol=1e-6)
        assert exact != loses, wire
        assert np.isfinite(total).all() and np.corrcoef(total, np.sum(own, axis=0))[0, 1] > 0.1, wire


def in_any_order() -> None:
    """Operations of all kinds and sizes, begun in another order on each rank, with priorities that contradict."""
    works = {}
    for k in map(int, np.random.RandomState(RANK).permutation(40)):
        array = np.full(1 + k * 7919 % 50_000, float(k + RANK), "float32")
        priority = k * (-1) ** RANK
        if k % 5 == 0:
            works[k] = array, core.submit_broadcast(f"any {k}", array, [array], k % SIZE, priority)
        else:
            wire = "2bit" if k % 5 == 1 else ""
            works[k] = array, core.submit_allreduce(f"any {k}", [array], [array], priority=priority, wire=wire)
    for k in range(40):
        array, work = works[k]
        wait(work)
        if k % 5 == 1:
            same_bits(array)
        else:
            assert (array == (k + k % SIZE if k % 5 == 0 else SIZE * k + SIZE * (SIZE - 1) / 2)).all(), k


def disagreement() -> None:
    """What the ranks do not agree on is an error everywhere, with both sides; what they agree on goes on."""
    array = np.zeros(10 + (RANK == SIZE - 1))
    try:
        wait(core.submit_allreduce("shape", [array], [array]))
    except core.Error as error:
        assert all(word in str(error) for word in ("shape", "(10,)", "(11,)", "rank")), error
    else:
        raise AssertionError("arrays of different shapes were summed")
    expect("after it", [values(rank, 9) for rank in range(SIZE)])


def part_of_the_ranks() -> None:
    """A group beside that of all: the first and the last rank."""
    mine = RANK in (0, SIZE - 1)
    comm = COMM.Split(0 if mine else MPI.UNDEFINED, RANK)
    if mine:
        group = core.make_group(comm.py2f(), [0, SIZE - 1], {})
        array = np.full(300_000, RANK + 1.0)
        wait(group.submit_allreduce("two", [array], [array]))
        assert (array == SIZE + 1).all()
        comm.barrier()
        group.shutdown()


def waiting() -> None:
    """A rank that waits for one of another host sleeps; the best of some tries, since the machine is shared."""
    array, shares = np.ones(1000), []
    for _ in range(_MOST_TRIES):
        COMM.barrier()
        if RANK == SIZE - 1:
            time.sleep(0.6)
        begin, cpu = time.perf_counter(), time.process_time()
        wait(core.submit_allreduce("late", [array], [array]))
        shares.append((time.process_time() - cpu) / (time.perf_counter() - begin))
        if COMM.allreduce(RANK == SIZE - 1 or shares[-1] < _MOST_OF_A_CORE, MPI.LAND):
            return
    raise AssertionError(shares)


def values(rank: int, count: int, dtype: str = "float32") -> np.ndarray:
    """Those of a rank, small enough that no dtype overflows in a sum."""
    return ((np.arange(count) * 7 + rank * 3) % 5).astype(dtype)


def expect(name: str, inputs: list[np.ndarray], op: str = "sum") -> None:
    """Assert that a reduction has numpy's result."""
    array = inputs[RANK].copy()
    wait(core.submit_allreduce(name, [array], [array], op))
    expected = _FUNCTIONS[op].reduce([one.astype("float64") for one in inputs]).astype(array.dtype)
    np.testing.assert_array_equal(array, expected, err_msg=name)


def same_bits(array: np.ndarray) -> None:
    """Assert that all ranks have them."""
    assert len(set(COMM.allgather(zlib.crc32(array.tobytes())))) == 1


def wait(work) -> None:
    """Wait, and say for whom where that takes too long."""
    assert work.wait(_WAIT_S), core.waiting()


if __name__ == "__main__":
    main()
