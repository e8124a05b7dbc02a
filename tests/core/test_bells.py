"""Waking the ranks of a host: bells ring without the lock of the table, and wake the thread that waits.

No MXNet: the core alone, on numpy arrays.
"""

from __future__ import annotations

import os
import resource
import threading
import time

import numpy as np
import pytest

_ENV = {"MYKV_TEST_POOL": "bells"}  # ranks that never import MXNet


@pytest.fixture
def core():
    from compiled import core
    from mpi4py import MPI

    if not core.is_initialized():
        core.init(MPI.COMM_WORLD.py2f())
    return core


def _sum(core, name: str, count: int = 10):
    array = np.ones(count, "float32")
    return core.submit_allreduce(name, [array], [array]), array


@pytest.mark.alone
@pytest.mark.ranks(3, env=_ENV)
def test_a_rank_delayed_before_it_rings_keeps_no_lock_and_no_result(core, rank, size, gather):
    """The rank that comes last sleeps for three seconds between its change and the rings."""
    from compiled import testing

    gather("all are here")
    if rank == size - 1:
        time.sleep(0.3)
        testing.plant("ring", 1)
        begun = time.monotonic()
        work, array = _sum(core, "late ring")
        assert time.monotonic() - begun > 2.9  # the fault has happened
        testing.plant("ring", 0)
        works = [_sum(core, f"meanwhile {k}") for k in range(10)]
    else:
        begun = time.monotonic()
        work, array = _sum(core, "late ring")
        if rank == 0:
            assert work.wait(10) and 0.1 < time.monotonic() - begun < 2.5  # a rank that sleeps looks once a second
        else:
            time.sleep(0.6)
        begun = time.monotonic()
        works = [_sum(core, f"meanwhile {k}") for k in range(10)]
        assert time.monotonic() - begun < 1  # the table is not locked
    assert work.wait(10) and (array == size).all()
    for work, array in works:
        assert work.wait(10) and (array == size).all()
    gather("all have ended")


@pytest.mark.ranks(2, env=_ENV)
@pytest.mark.parametrize("waits", [True, False])
def test_a_late_rank_wakes_the_others_at_once(core, rank, size, gather, waits):
    """Without a ring, or with a ring for another thread, each operation would take up to a second."""
    took = []
    for _ in range(12):
        gather("together")
        if rank == 1:
            time.sleep(0.03)
        begun = time.monotonic()
        work, array = _sum(core, f"late {waits}")
        while not waits and not work.done():  # the runtime's thread ends it
            time.sleep(0.001)
        assert work.wait(10) and (array == size).all()
        took.append(time.monotonic() - begun)
    assert sorted(took)[len(took) // 2] < 0.3, took
    gather("all have ended")


@pytest.mark.alone
@pytest.mark.ranks(2, env=_ENV)
def test_a_thread_that_waits_does_the_runtimes_part(core, rank, size, gather):
    """A rank that waits sleeps once for each operation, and no other thread of it wakes."""
    count = 60
    gather("together")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    own = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    for _ in range(count):
        if rank == 1:
            time.sleep(0.02)
        work, array = _sum(core, "waits")
        assert work.wait(10) and (array == size).all()
    elsewhere = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before
    elsewhere -= resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - own
    assert elsewhere < count / 2, elsewhere  # other threads of the pool may have woken too
    gather("all have ended")


@pytest.mark.ranks(3, env=_ENV)
def test_several_threads_wait_and_go_while_others_post(core, rank, size, gather):
    """Stand-ins take turns with each other and the thread; all kinds of operations, with and without time limits."""
    gather("together")
    failures = []

    def run(number: int) -> None:
        random = np.random.RandomState(10 * rank + number)
        buffer = core.allocate(4 * 200_000)
        bucket = np.frombuffer(buffer, "float32")
        try:
            for k in range(60):
                bucket[:] = rank + 1
                works = [
                    _sum(core, f"thread {number} small"),
                    _sum(core, f"thread {number} large", 300_000),
                    (core.submit_bucket(f"thread {number} bucket", buffer, 0, bucket.size, "float32"), bucket),
                ]
                expected = [size, size, size * (size + 1) / 2]
                for j in random.permutation(len(works)):
                    work, array = works[j]
                    if random.randint(4) == 0:
                        time.sleep(random.rand() * 0.003)
                    while not work.wait(random.choice([0, 0.0005, 20])):
                        pass
                    assert (array == expected[j]).all(), (number, k, j)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert not failures and not any(one.is_alive() for one in threads), failures
    gather("all have ended")


@pytest.mark.ranks(3, env=_ENV)
@pytest.mark.parametrize("count", [1000, 30_000, 1 << 20])  # one chunk, which one rank reduces; and more than cores
def test_an_operation_in_place_ends_on_ranks_that_were_not_woken_for_it(core, rank, size, gather, count):
    buffer = core.allocate(4 * count)
    array = np.frombuffer(buffer, "float32")
    gather("together")
    for k in range(10):
        array[:] = rank + 1
        time.sleep(0.005 * ((rank + k) % size))
        assert core.submit_bucket(f"in place {count}", buffer, 0, count, "float32").wait(20)
        assert (array == size * (size + 1) / 2).all()
    gather("all have ended")


@pytest.mark.alone
@pytest.mark.ranks(4, env=_ENV)
def test_with_more_ranks_than_cores_the_same_ranks_always_work_on_the_same_memory(core, rank, size, gather):
    """Otherwise each process would pay for its first access to every slot, and have page tables for all of them."""
    cores = os.sysconf("SC_NPROCESSORS_ONLN")
    if size <= cores:
        pytest.skip(f"{size} ranks are no more than the {cores} cores")
    buffer = core.allocate(4 << 20)
    array = np.frombuffer(buffer, "float32")
    array[:] = 0
    gather("together")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        array[:] = rank + 1
        assert core.submit_bucket("same memory", buffer, 0, array.size, "float32").wait(20)
        assert array.min() == array.max() == size * (size + 1) / 2  # takes no memory, so makes no faults
    faults = gather(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    # The slots of the others have 3072 pages, of which a fault maps 16 at most.
    assert 1 <= sum(count > 150 for count in faults) <= max(cores, 2), faults
    assert core.submit_bucket("same memory", buffer, 0, array.size, "float32").wait(20)
