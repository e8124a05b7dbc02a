"""How operations end: waiting ranks are woken, failed ones end at once, and each end reaches late ranks.

No MXNet: the core alone, on numpy arrays.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from compiled import testing

_ENV = {"MYKV_TEST_POOL": "hosts"}  # ranks that never import MXNet


@pytest.fixture
def start(gather):
    """A function that starts the core with options; the core ends after the test."""
    from compiled import core
    from mpi4py import MPI

    def _start(**options):
        core.init(MPI.COMM_WORLD.py2f(), options)
        return core

    yield _start
    gather("no rank asks for anything more")
    core.shutdown()


def _submit(core, name: str, count: int = 10):
    array = np.ones(count, "float32")
    return core.submit_allreduce(name, [array], [array])


@pytest.mark.ranks(3, env=_ENV)
def test_a_verdict_of_the_hosts_rings_the_bells_of_all_ranks(rank, start, gather):
    """Rank 1 has no slice, since the second host has one rank: it only sleeps, until the verdict and until the end."""
    core = start(virtual_hosts=2)
    rounds, rings = 20, []
    for k in range(rounds):
        gather("the last operation has ended")
        before = testing.bell_rings(core.world())
        if rank == 2:
            time.sleep(0.02)  # the others sleep by then
        assert _submit(core, f"x {k}", 20_000).wait(30)
        rings.append(testing.bell_rings(core.world()) - before)
    if rank == 1:
        assert sum(rings) >= 3 * rounds, rings  # what it has posted, the verdict, the end


@pytest.mark.ranks(2, env=_ENV)
def test_entries_that_came_ahead_are_given_back_to_the_rank_that_made_them(rank, start, gather):
    core = start(table_capacity=32)
    for k in range(5):
        works = []
        for maker in (0, 1):
            if rank == maker:
                works += [_submit(core, f"{k} {maker} {n}") for n in range(10)]
            gather("one rank is ahead")
        if rank == 1:
            time.sleep(0.01)
        other = 1 - rank
        works += [_submit(core, f"{k} {other} {n}") for n in range(10)]
        assert all(work.wait(30) for work in works)
        gather("all have left all entries")
        ahead = testing.entries_ahead(core.world())
        gather("all have looked")
        assert ahead == [0, 0]


@pytest.mark.ranks(2, env=_ENV)
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_failed_operation_ends_at_once(rank, start, hosts):
    """No rank waits for work that no rank begins."""
    core = start(virtual_hosts=hosts)
    begun = time.monotonic()
    for k in range(8):
        with pytest.raises(core.Error, match="differs between ranks"):
            _submit(core, f"x {k}", 300_000 + rank).wait(30)
    assert time.monotonic() - begun < 6


@pytest.mark.parametrize(
    "parts, first_agreed, ends",
    [
        (["", "", ""], True, 2),
        (["", "no memory", ""], True, 2),  # all ranks bring all parts
        (["no memory", "", ""], True, 2),
        (["differs"], False, 0),  # no rank brings another part
    ],
)
def test_a_request_ends_with_its_last_part(parts, first_agreed, ends):
    assert testing.last_part(3, parts, first_agreed) == ends


@pytest.mark.ranks(2, env=_ENV)
def test_a_rank_whose_host_comes_after_the_end_gets_it_too(rank, start, gather):
    core = start(virtual_hosts=2)
    for late in (0, 1):
        name = f"late {late}"
        if rank != late:
            work = _submit(core, name)
            deadline = time.monotonic() + 20
            while not work.done() and time.monotonic() < deadline:
                core.give_up(name, "nobody has come")
                time.sleep(0.02)
        gather("the operation has ended on the other host")
        if rank == late:
            time.sleep(0.2)
            work = _submit(core, name)
        with pytest.raises(core.Error, match="nobody has come"):
            assert work.wait(10), "no end"


def _wait_until_stopped(pid: int) -> None:
    """Return once all threads of a process that got SIGSTOP have stopped: on a busy machine some run on for a while."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        stats = []
        for path in Path(f"/proc/{pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):  # the thread has ended
                stats.append(path.read_text())
        if all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats):
            return
        time.sleep(0.001)
    raise AssertionError(f"process {pid} runs on after SIGSTOP")


@pytest.mark.ranks(3, env=_ENV)
def test_an_answer_to_an_earlier_question_is_not_taken_for_one_to_this(rank, start, gather):
    """Rank 1 is stopped during a question about "x", at which it has not arrived, and answers a question about "y"."""
    core = start(virtual_hosts=3)
    pids = gather(os.getpid())
    works = []
    if rank == 0:
        works += [_submit(core, "x"), _submit(core, "y")]
    if rank == 1:
        works += [_submit(core, "y")]
    gather("all wait for rank 2")
    if rank == 0:
        os.kill(pids[1], signal.SIGSTOP)
        try:
            _wait_until_stopped(pids[1])
            ((_, _, missing, silent),) = core.waiting("x")
            assert missing == [2] and silent == [1]
        finally:
            os.kill(pids[1], signal.SIGCONT)
        ((_, _, missing, silent),) = core.waiting("y")
        assert missing == [2] and silent == []
    gather("the questions were asked")
    if rank:
        works += [_submit(core, "x")]
    if rank == 2:
        works += [_submit(core, "y")]
    assert all(work.wait(30) for work in works)


_DAEMONS = """
import threading, time
import numpy as np
from mpi4py import MPI
from compiled import core

core.init(MPI.COMM_WORLD.py2f(), {})
array = np.ones(10, "float32")
work = core.submit_allreduce("x", [array], [array])

def wait():
    while True:
        work.wait(60)  # releases Python's lock and takes it again

class Slow:
    def __del__(self):
        time.sleep(0.5)  # Python is ending, and other threads run

for _ in range(2):
    threading.Thread(target=wait, daemon=True).start()
slow = Slow()
time.sleep(0.2)
print("end", flush=True)
"""


def test_python_ends_while_daemon_threads_are_in_the_core(mpirun):
    """Until Python 3.13 Python ends such a thread by unwinding its stack, through the core's frames."""
    result = mpirun(1, _DAEMONS)
    assert result.code == 0 and result.stdout.count("end") == 1, result.text
