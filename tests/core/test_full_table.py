"""More operations under way than the host's table has entries: all of them end, in any order of waits."""

from __future__ import annotations

import time

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.processes import shared_memory
from harness.support import mx

_SMALL = {"MYKV_TABLE_PLACES": "64"}
_PARTS = {"MYKV_PART_BYTES": "4096"}


def _ring_of_waits(rank: int, size: int, count: int) -> None:
    """Each rank runs ahead with broadcasts of other roots, and waits for the operations that are due first.

    A root's broadcasts and the sums use one array, so that they run one after the other there, while the broadcasts of
    the other roots wait for nothing. Before the first of them a sum is asked for which the other ranks ask for last.
    """
    mykv.init()
    chained, gates = mx.nd.ones(4), [mx.nd.ones(4) for _ in range(size)]
    received = [[mx.nd.zeros(4) for _ in range(count)] for _ in range(size)]
    mykv.allreduce_(chained, average=False, name=f"gate {rank}")
    for k in range(count):
        for root in range(size):
            mykv.broadcast_(chained if rank == root else received[root][k], root_rank=root, name=f"from {root} {k}")
        mykv.allreduce_(chained, average=True, name=f"sum {k}")
    for other in range(size):
        if other != rank:
            mykv.allreduce_(gates[other], average=False, name=f"gate {other}")
    begin = time.monotonic()
    mx.nd.waitall()
    assert time.monotonic() - begin < 40
    assert (chained.asnumpy() == size).all()
    for root in range(size):
        for k in range(0, count, 97):
            assert (received[root][k].asnumpy() == (0 if root == rank else size)).all()


@pytest.mark.ranks(3, long=(2,), env=_SMALL)
def test_the_oldest_operation_finds_a_place_in_a_small_table(rank, size):
    _ring_of_waits(rank, size, 3000)


def _one_rank_behind(rank: int, count: int) -> None:
    """What reads one array runs in order on the root, but not elsewhere, as with init, push and pull of a store.

    The other ranks fill the tables of their hosts with broadcasts that the root comes to one by one.
    """
    mykv.init()
    value, shared = mx.nd.ones(4), [mx.nd.ones(3000) for _ in range(5)]
    received = [mx.nd.zeros(4) for _ in range(count)]
    mykv.barrier()
    if rank == 0:
        time.sleep(0.5)
    for k in range(count):
        mykv.broadcast_(value if rank == 0 else received[k], root_rank=0, name=f"init {k}", priority=1)
        mykv.allreduce_(value, average=True, name=f"push {k}")
        mykv.allreduce_(shared[k % 5], average=True, name=f"parts {k % 5}")
    begin = time.monotonic()
    mx.nd.waitall()
    assert time.monotonic() - begin < 40
    for one in [value, *shared, *(received[:: count // 9] if rank > 0 else [])]:
        assert (one.asnumpy() == 1).all()


@pytest.mark.ranks(3, long=(2,), env={**_SMALL, **_PARTS})
def test_a_root_that_is_behind(rank, size):
    _one_rank_behind(rank, 2000)


@pytest.mark.ranks(3, long=(2,), env={**_SMALL, **_PARTS, "MYKV_VIRTUAL_HOSTS": "2"})
def test_a_root_that_is_behind_on_another_host(rank, size):
    _one_rank_behind(rank, 2000)


@pytest.mark.ranks(2, env=_SMALL)
@pytest.mark.parametrize("elements", [4, 20_000])  # posted by the thread that asks for them, or by the core's own
def test_a_rank_far_ahead_comes_to_what_others_ask_for(rank, size, elements):
    """All of one kind are asked for first by one rank, and alternate with another kind on the other rank."""
    mykv.init()
    core, count = mykv.world.process.core, 20_000
    ahead = np.zeros(count, "float32")
    beside = np.ones(elements, "float32")
    begin = time.monotonic()
    works = []
    for k in range(count if rank == 1 else 0):
        works.append(core.submit_allreduce(f"ahead {k}", [ahead[k : k + 1]], [ahead[k : k + 1]]))
    for k in range(count):
        if rank == 0:
            assert core.submit_allreduce(f"ahead {k}", [np.ones(1, "float32")], [ahead[k : k + 1]]).wait(60)
        if k % 10 == 0:
            assert core.submit_allreduce(f"beside {k}", [beside], [beside], scale=0.5).wait(60)
    assert all(work.wait(60) for work in works)
    assert (ahead == 1).all() and (beside == 1).all()
    assert time.monotonic() - begin < 40


@pytest.mark.ranks(2, env=_SMALL)
def test_operations_that_find_no_place_keep_no_memory(rank, size):
    """Their values are copied into shared memory before the rank sees that the table is full."""
    mykv.init()
    core, count = mykv.world.process.core, 4000
    values, total = np.ones(4096, "float32"), np.empty(4096, "float32")
    assert core.submit_allreduce("first", [values], [total]).wait(60)
    before = shared_memory()
    works = [core.submit_allreduce(f"ahead {k}", [values], [total]) for k in range(count if rank == 1 else 0)]
    if rank == 1:
        assert shared_memory() - before < count * values.nbytes // 8  # half of them are copied; 64 find an entry
    assert core.submit_allreduce("through", [values[:1]], [total[:1]]).wait(60)
    if rank == 0:
        works = [core.submit_allreduce(f"ahead {k}", [values], [total]) for k in range(count)]
    assert all(work.wait(60) for work in works)
    assert (total == 2).all()


def _large_arrays(rank: int, size: int) -> None:
    """Every rank begins with a different operation, so that most parts arrive while others are due."""
    mykv.init()
    arrays = [np.full(200_000 + 1000 * k, k + rank, "float32") for k in range(6)]
    for _ in range(3):
        works = {}
        for k in range(len(arrays)):
            k = (k + rank) % len(arrays)
            works[k] = mykv.world.process.core.submit_allreduce(f"large {k}", [arrays[k]], [arrays[k]], scale=1 / size)
        assert all(work.wait(60) for work in works.values())
    for k, array in enumerate(arrays):
        np.testing.assert_allclose(array, k + (size - 1) / 2, rtol=1e-6)


@pytest.mark.ranks(2, long=(4,), env={**_SMALL, **_PARTS})
def test_arrays_of_more_parts_than_the_table_has_entries(rank, size):
    _large_arrays(rank, size)


@pytest.mark.ranks(3, long=(2, 4), env={**_SMALL, **_PARTS, "MYKV_VIRTUAL_HOSTS": "2"})
def test_arrays_of_more_parts_than_the_tables_of_hosts_have_entries(rank, size):
    _large_arrays(rank, size)


_LACK = """
import threading, time
import numpy as np
from mpi4py import MPI
from compiled import core, testing

comm = MPI.COMM_WORLD
core.init(comm.py2f(), {"table_capacity": 160})  # 64 entries have memory from the start
rank, said = comm.rank, []

def watch():
    for reports in iter(lambda: core.next_stalls(0.2, 0.0), None):
        said.extend(text for _, text in reports)

def submit(names):
    arrays = [np.full(10, rank + 1, "float32") for _ in names]
    return [(core.submit_allreduce(f"x {k}", [array], [array]), array) for k, array in zip(names, arrays)]

def until(text):
    deadline = time.monotonic() + 60
    while not any(text in one for one in said):
        assert time.monotonic() < deadline, said
        time.sleep(0.02)

works = []
if rank == 0:
    core.begin_stall_watch()
    threading.Thread(target=watch, daemon=True).start()
    testing.plant("entries", 1 << 40)
    works += submit(range(66))
    until("there is no memory for more entries: a planted lack")
    testing.plant("entries", 0)
    works += submit(range(66, 120))  # more than this rank's share of the table
    deadline = time.monotonic() + 60
    while sum(testing.entries_ahead(core.world())) <= 66:  # the lack is over
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.2)
    said.clear()
    until("its share is in use")
    assert not any("memory" in one for one in said), said
comm.Barrier()
works += submit(range(len(works), 120))
for work, array in works:
    assert work.wait(60) and (array == 3).all()
if rank == 0:
    core.end_stall_watch()
core.shutdown()
print("end", flush=True)
"""


def test_a_lack_of_memory_for_entries_is_told_while_it_lasts(mpirun):
    """Operations wait for memory and continue once it is available; later waits for a share are reported as such."""
    result = mpirun(2, _LACK, timeout=180)
    assert result.code == 0 and result.stdout.count("end") == 2, result.text
