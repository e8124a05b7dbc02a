"""The compiled core alone, on numpy arrays and on its own memory; MXNet is not imported."""

from __future__ import annotations

import importlib.util
import runpy
import time
import zlib
from pathlib import Path
from typing import Any, Callable

import numpy as np
from mpi4py import MPI

from .job import Job, Series, timed
from .meeting import Meeting

# By its path, since the package would import MXNet.
_LOAD = Path(importlib.util.find_spec("kvstore_plugin").origin).with_name("_load_core.py")
core: Any = runpy.run_path(str(_LOAD))["load"]()
COMM = MPI.COMM_WORLD


def pushpull(case: dict[str, Any], meeting: Meeting) -> Series:
    """Seconds of one allreduce of 'nbytes' bytes of any numpy array, copied in and out."""
    array = np.zeros(case["nbytes"] // 4, np.float32)

    def work() -> None:
        core.submit_allreduce(case["id"], [array], [array]).wait()

    times = timed(case, meeting, lambda: array.fill(COMM.rank + 1), work)
    _check(array, case)
    yield "time", times


def in_place(case: dict[str, Any], meeting: Meeting) -> Series:
    """Seconds of one allreduce of 'nbytes' bytes in shared memory, in place."""
    buffer = core.allocate(case["nbytes"])
    array = np.frombuffer(buffer, np.float32)

    def work() -> None:
        core.submit_bucket(case["id"], buffer, 0, array.size, "float32").wait()

    times = timed(case, meeting, lambda: array.fill(COMM.rank + 1), work)
    _check(array, case)
    yield "time", times


def paused(case: dict[str, Any], meeting: Meeting) -> Series:
    """Seconds of one allreduce in shared memory after 'pause' seconds of sleep, and its processor time on all ranks."""
    buffer = core.allocate(case["nbytes"])
    array = np.frombuffer(buffer, np.float32)

    def prepare() -> None:
        array.fill(COMM.rank + 1)
        time.sleep(case["pause"])

    def work() -> None:
        core.submit_bucket(case["id"], buffer, 0, array.size, "float32").wait()

    times = timed(case, meeting, prepare, work)
    _check(array, case)
    yield "time", times

    def pause_and_work() -> None:
        time.sleep(case["pause"])
        work()

    both = [_cpu(case, meeting, each) for each in (pause_and_work, lambda: time.sleep(case["pause"]))]
    yield "cpu of all ranks", [both[0] - both[1]]


def in_a_row(case: dict[str, Any], meeting: Meeting) -> Series:
    """Processor seconds of all ranks for one of many allreduces in shared memory, without pauses."""
    buffer = core.allocate(case["nbytes"])
    np.frombuffer(buffer, np.float32).fill(1)  # grows to infinity, at no extra cost
    count = case["nbytes"] // 4

    def work() -> None:
        core.submit_bucket(case["id"], buffer, 0, count, "float32").wait()

    yield "cpu of all ranks", [_cpu(case, meeting, work)]


def _cpu(case: dict[str, Any], meeting: Meeting, work: Callable[[], None]) -> float:
    """Processor seconds of this process, with all threads, per call of many consecutive calls."""
    for _ in range(case["warmup"]):
        work()
    meeting.start()
    begin = time.process_time()
    for _ in range(case["iterations"]):
        work()
    used = time.process_time() - begin
    meeting.start()
    return used / case["iterations"]


def compressed(case: dict[str, Any], meeting: Meeting) -> Series:
    """Seconds of one allreduce in shared memory of normal random numbers, sent in the form 'wire'."""
    buffer = core.allocate(case["nbytes"])
    array = np.frombuffer(buffer, np.float32)
    everyone = [
        np.random.Generator(np.random.SFC64(rank)).standard_normal(array.size, np.float32) for rank in range(COMM.size)
    ]

    def work() -> None:
        core.submit_bucket(case["id"], buffer, 0, array.size, "float32", wire=case["wire"]).wait()

    times = timed(case, meeting, lambda: np.copyto(array, everyone[COMM.rank]), work)
    exact = np.sum(everyone, axis=0)
    if len(set(COMM.allgather(zlib.crc32(array)))) > 1 or not array.any():
        raise ArithmeticError(f"{case['id']}: the ranks have other results, or none.")
    # Even the largest 1% of all elements has more than a tenth of the sum's norm.
    if np.dot(array, exact) < 0.1 * np.linalg.norm(array) * np.linalg.norm(exact):
        raise ArithmeticError(f"{case['id']}: the result is not a sum.")
    yield "time", times


def late(case: dict[str, Any], meeting: Meeting) -> Series:
    """Share of a core that rank 0 uses while it waits 'seconds' for the others."""
    array = np.zeros(1024, np.float32)
    shares = []
    for _ in range(case["iterations"]):
        begin, cpu = meeting.start(), time.process_time()
        if COMM.rank != 0:
            time.sleep(case["seconds"])
        core.submit_allreduce(case["id"], [array], [array]).wait()
        used = (time.process_time() - cpu) / (time.perf_counter() - begin)
        shares.append(used if COMM.rank == 0 else 0.0)
    yield "share", shares


def agreement(case: dict[str, Any], meeting: Meeting) -> Series:
    """Messages and bytes of the agreement in a step of 'keys' operations, and the step's seconds."""
    arrays = [np.zeros(16, np.float32) for _ in range(case["keys"])]
    begin = np.zeros(4)

    def work() -> None:
        works = [core.submit_allreduce(f"{case['id']}/{k}", [one], [one]) for k, one in enumerate(arrays)]
        for one in works:
            one.wait()

    timed({**case, "iterations": 1}, meeting, lambda: None, work)
    begin = np.array(core.agreement_traffic(), float)
    times = timed({**case, "warmup": 0}, meeting, lambda: None, work)
    sent, sent_bytes, received, received_bytes = (np.array(core.agreement_traffic()) - begin) / case["iterations"]
    yield "time", times
    # The same in all iterations; Results uses the largest value, which is rank 0's.
    yield "messages", [float(sent + received)]
    yield "message bytes", [float(sent_bytes + received_bytes)]


def _check(array: Any, case: dict[str, Any]) -> None:
    expected = COMM.size * (COMM.size + 1) / 2
    if array[0] != expected or array[-1] != expected:
        raise ArithmeticError(f"{case['id']}: the result holds {array[0]} and {array[-1]}, not {expected}.")


if __name__ == "__main__":
    core.init(COMM.py2f())
    kinds = {
        "pushpull": pushpull,
        "in place": in_place,
        "paused": paused,
        "in a row": in_a_row,
        "compressed": compressed,
        "late": late,
        "agreement": agreement,
    }
    Job().run(COMM.rank, kinds)
    core.shutdown()
