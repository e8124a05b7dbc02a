"""A thread that pushes a small operation stays awake for it for a moment, and may end it itself."""

from __future__ import annotations

import os
import time

import kvstore_plugin as mykv
import mykv_core_testing
import numpy as np
import pytest
from harness.support import array, value


@pytest.fixture(autouse=True)
def _ready():
    """Start with fresh credit for staying awake, which waits in vain use up."""
    if os.sysconf("SC_NPROCESSORS_ONLN") < 2:
        pytest.skip("needs a core for each of two ranks; with fewer no thread stays awake")
    if mykv.is_initialized():
        mykv.shutdown()
    mykv.init()
    yield
    mykv_core_testing.plant("linger", 0)


def _push(name: str, rank: int, count: int = 8):
    """Push a sum; its result, and how many seconds the push took."""
    mine = array(np.full(count, rank + 1, "float32"))
    mine.wait_to_read()
    begun = time.monotonic()
    result = mykv.allreduce(mine, average=False, name=name)
    return result, time.monotonic() - begun


@pytest.mark.ranks(2)
def test_the_thread_that_pushes_ends_the_operation_when_the_others_come_soon(rank, gather):
    value(_push("before", rank)[0])
    gather("together")
    if rank == 0:
        mykv_core_testing.plant("linger", 1)  # ten seconds in place of 20 us
    else:
        time.sleep(0.5)
    result, took = _push("soon", rank)
    assert (value(result) == 3).all()
    if rank == 0:
        assert 0.2 < took < 8, took  # until the other rank came, and no longer
    gather("all have ended")


@pytest.mark.ranks(2)
def test_a_push_returns_when_the_others_do_not_come(rank, gather):
    value(_push("before", rank)[0])
    gather("together")
    if rank == 1:
        time.sleep(0.5)
    result, took = _push("late", rank)
    if rank == 0:
        assert took < 0.4, took
    assert (value(result) == 3).all()
    gather("all have ended")


@pytest.mark.ranks(2)
def test_no_push_lingers_while_another_operation_is_under_way(rank, gather):
    value(_push("before", rank)[0])
    gather("together")
    if rank == 0:
        first, _ = _push("first", rank, 1_000_000)
        mykv_core_testing.plant("linger", 1)
        second, took = _push("second", rank)
        assert took < 5, took
        gather("both are pushed")
    else:
        gather("both are pushed")
        first, _ = _push("first", rank, 1_000_000)
        second, _ = _push("second", rank)
    assert (value(first) == 3).all() and (value(second) == 3).all()
    gather("all have ended")
