"""An exception of a signal handler at any line of a call of several operations, which the script catches.

The handler is played by a trace function that raises on one rank. All ranks get an error or a result, none waits, and
the next call works.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.marks import long
from harness.support import MXNetError, array, clear_errors, dense_network, mx
from mxnet import autograd

_PACKAGE = os.path.dirname(mykv.__file__)
_LIMIT = 20.0  # seconds, on a busy machine


class _Interrupt(Exception):
    pass


@contextlib.contextmanager
def _raising_at(number, folders):
    """Raise at line `number`, counted from 0, of those that run in files below the folders; yields whether it did."""
    lines, raised = 0, []

    def trace(frame, event, argument):
        nonlocal lines
        if not frame.f_code.co_filename.startswith(folders):
            return None
        if event == "line" and not raised:
            lines += 1
            if lines > number:
                raised.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
                raise _Interrupt("in a signal handler")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield raised
    finally:
        sys.settrace(before)


def _try_all_lines(make, rank, gather, folders, first=0, stride=1, most=1000):
    """Let each line raise once that runs below the folders in a call that `make` returns, or some of the lines."""
    folders = tuple(os.path.join(_PACKAGE, one) for one in folders)
    mykv.init()
    for number in range(first, first + stride * most, stride):
        call = make()
        began = time.monotonic()
        raised = []
        with contextlib.suppress(MXNetError, _Interrupt):
            if rank == 1:
                with _raising_at(number, folders) as raised:
                    call()
            else:
                call()
        clear_errors()
        # A rank that has left out a call before its turn meets the other rank there: both have an error, once.
        for attempt in range(2):
            try:
                mykv.barrier()
                break
            except MXNetError:
                assert attempt == 0, raised
        places = gather(raised)
        assert time.monotonic() - began < _LIMIT, places
        if not places[1]:
            break
    assert number > 10
    make()()


_ROWS = np.ones((2, 3), "float32")
_CALLS = {
    "grouped_allgather": lambda: [one.asnumpy() for one in mykv.grouped_allgather([array(_ROWS), array(_ROWS)])],
    "alltoall": lambda: mykv.alltoall(array(_ROWS), splits=[2, 0])[0].asnumpy(),
    "allgather_object": lambda: mykv.allgather_object("object"),
    "broadcast_object": lambda: mykv.broadcast_object("object", root_rank=1),
}


@pytest.mark.ranks(2, timeout=170)
@pytest.mark.parametrize("call", _CALLS)
def test_calls_that_wait(call, rank, gather):
    _try_all_lines(lambda: _CALLS[call], rank, gather, ["coordination", "collectives"])


def _broadcast():
    mykv.broadcast_parameters(dense_network(seed=0).collect_params(), root_rank=0)


def _construct():
    mykv.DistributedTrainer(dense_network(seed=0).collect_params(), "sgd", update_on_kvstore=True)
    mx.nd.waitall()


@pytest.mark.ranks(2, timeout=170)
@pytest.mark.parametrize(
    "call, folder", [(_construct, "training"), long(_construct, "gradients"), long(_broadcast, "parameters")]
)
def test_calls_of_several_meetings(call, folder, rank, gather):
    """Where a meeting of the call is not refused, the workers find out within seconds that they wait for each other."""
    _try_all_lines(lambda: call, rank, gather, [folder], first=11, stride=29, most=5)


@pytest.mark.long  # takes minutes
@pytest.mark.ranks(2, timeout=170)
def test_a_step_with_the_optimizer_on_the_store(rank, gather):
    def make():
        net = dense_network(seed=0)
        trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, update_on_kvstore=True)

        def step():
            with autograd.record():
                loss = (net(array(np.ones((4, 6), "float32"))) ** 2).sum()
            loss.backward()
            trainer.step(4)
            mx.nd.waitall()

        step()
        return step

    _try_all_lines(make, rank, gather, ["sharded_optimizer/optimizer.py"])
