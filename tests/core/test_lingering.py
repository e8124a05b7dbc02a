"""A thread that pushes a small operation spins briefly for it, and may complete it itself."""

from __future__ import annotations

import os
import time

import kvstore_plugin as mykv
import numpy as np
import pytest
from compiled import testing
from harness.support import array, value


@pytest.fixture(autouse=True)
def _ready():
    if os.sysconf("SC_NPROCESSORS_ONLN") < 2:
        pytest.skip("needs a core for each of two ranks; with fewer no thread stays awake")
    yield
    testing.plant("linger", 0)


def _with_fresh_credit():
    """Start with fresh credit for staying awake, which waits in vain use up."""
    if mykv.is_initialized():
        mykv.shutdown()
    mykv.init()


def _push(name: str, rank: int, count: int = 8):
    """Push a sum; its result, and how many seconds the push took."""
    mine = array(np.full(count, rank + 1, "float32"))
    mine.wait_to_read()
    begun = time.monotonic()
    result = mykv.allreduce(mine, average=False, name=name)
    return result, time.monotonic() - begun


# On a busy machine init() itself may use up the credit, or another thread have the loop: such a trial shows nothing.
@pytest.mark.ranks(2)
def test_the_thread_that_pushes_ends_the_operation_when_the_others_come_soon(rank, gather):
    for _ in range(10):
        _with_fresh_credit()
        value(_push("before", rank)[0])
        gather("together")
        if rank == 0:
            testing.plant("linger", 1)  # ten seconds instead of 20 us
        else:
            time.sleep(0.5)
        result, took = _push("soon", rank)
        assert (value(result) == 3).all()
        assert took < 8, took  # until the other rank arrived, and no longer
        if gather(took)[0] > 0.2:
            return
    pytest.fail("no push has lingered")


@pytest.mark.ranks(2)
def test_a_push_returns_when_the_others_do_not_come(rank, gather):
    times = []
    for _ in range(3):
        _with_fresh_credit()
        value(_push("before", rank)[0])
        gather("together")
        if rank == 1:
            time.sleep(0.5)
        result, took = _push("late", rank)
        assert (value(result) == 3).all()
        times.append(gather(took)[0])
    assert min(times) < 0.4, times


@pytest.mark.ranks(2)
def test_no_push_lingers_while_another_operation_is_under_way(rank, gather):
    _with_fresh_credit()
    value(_push("before", rank)[0])
    gather("together")
    if rank == 0:
        first, _ = _push("first", rank, 1_000_000)
        testing.plant("linger", 1)
        second, took = _push("second", rank)
        assert took < 5, took
        gather("both are pushed")
    else:
        gather("both are pushed")
        first, _ = _push("first", rank, 1_000_000)
        second, _ = _push("second", rank)
    assert (value(first) == 3).all() and (value(second) == 3).all()
    gather("all have ended")
